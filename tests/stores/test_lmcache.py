"""LMCache's L2 adapters as shared tiers: the contract holds for every supported version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stores.redis_server import PROGRAM

VERSIONS = ("0.5.1", "0.5.6")
CONTRACT = Path(__file__).with_name("lmcache_contract.py")


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="redis-server is not installed")
@pytest.mark.parametrize("version", VERSIONS)
def test_contract(version: str) -> None:
    installed = Path(sys.prefix) / f"lmcache-{version}"  # where `make` puts it
    if not installed.is_dir():
        pytest.skip(f"LMCache {version} is not installed: it has wheels for Linux only")
    env = {**os.environ, "PYTHONPATH": str(installed), "LMCACHE_UNDER_TEST": version}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=no", str(CONTRACT)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-8000:]
    assert "skipped" not in done.stdout
