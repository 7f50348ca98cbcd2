"""Run every shell command of a README, so that none of them goes stale.

Commands are the lines of ```bash blocks. A block behind `<!-- not in CI: reason -->` is left out; the reason is
printed. Python blocks behind `<!-- run -->` are run too.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*) -->\n)?```(?P<kind>bash|python)\n(?P<code>.*?)```", re.DOTALL)


def main() -> None:
    """Run the blocks in order; the first failure ends it."""
    for block in BLOCK.finditer(Path(sys.argv[1]).read_text(encoding="utf-8")):
        kind, code, mark = block["kind"], block["code"], block["mark"] or ""
        if mark.startswith("not in CI"):
            print(f"left out ({mark}): {code.strip()}", flush=True)
            continue
        if kind == "python" and mark != "run":
            continue
        print(f"README: {code.strip()}", flush=True)
        command = ["bash", "-euc", code] if kind == "bash" else [".venv/bin/python", "-c", code]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
