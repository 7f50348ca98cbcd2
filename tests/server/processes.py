"""Real vLLM servers in processes of their own, and a proxy that plays tricks on their clients."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from tests.stores.redis_server import free_port

SECRET = "a secret that both servers share"
PYTHON = os.environ.get("BLEND_RAG_VLLM_PYTHON", "")


class VLLMServer:
    """A vLLM server that `blend-rag serve --run` starts; it keeps its port over restarts.

    Args:
        model: folder.
        folder: where its log goes.
        api_key: what it wants of clients.
        options: further options of `blend-rag serve`.
    """

    def __init__(self, model: Path, folder: Path, *options: str, api_key: str | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"log-{self.port}"
        command = [str(Path(PYTHON).with_name("blend-rag")), "serve", str(model), "--run", "--port", str(self.port)]
        self._arguments = [*command, "--served-model-name", "smollm2", *options]
        self._arguments += ["--max-model-len", "2048", "--enforce-eager"]
        self._environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        self._environment["BLEND_RAG_STORE_SECRET"] = SECRET
        if api_key:
            self._environment["VLLM_API_KEY"] = api_key
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start; does not wait."""
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                self._arguments, env=self._environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, seconds: float = 240) -> None:
        """Wait until it answers."""
        assert self._process
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-3000:])

    def kill(self) -> None:
        """Kill -9, with all its processes."""
        assert self._process
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """End it politely; then for good."""
        if self._process and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def metric(self, name: str, **labels: str) -> float:
        """A value on its page of metrics; 0 where there is none."""
        page = httpx.get(f"{self.url}/metrics", headers=self._headers).text
        total = 0.0
        for line in page.splitlines():
            if line.startswith((f"vllm:{name}{{", f"vllm:{name}_total{{")) and all(
                f'{label}="{value}"' in line for label, value in labels.items()
            ):
                total += float(re.split(r"\s+", line.strip())[-1])
        return total


class Proxy:
    """Passes requests on to a server, with `before` and `after` to play tricks; not for streams."""

    def __init__(self, url: str) -> None:
        self.before: Callable[[str, dict[str, Any]], int | None] = lambda path, body: None
        self.after: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda path, answer: answer
        self.sessions: list[tuple[str, str]] = []  # command of each completion, and its session's header
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def _pass_on(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size) or b"{}")
                command = (body.get("kv_transfer_params") or {}).get("command", "")
                proxy.sessions.append((command, self.headers.get("X-Session-ID", "")))
                status = proxy.before(self.path, body)
                if status is None:
                    answer = httpx.request(
                        self.command,
                        url + self.path,
                        json=body if self.command == "POST" else None,
                        headers={"Authorization": self.headers.get("Authorization", "")},
                        timeout=120,
                    )
                    status = answer.status_code
                    is_json = "json" in answer.headers.get("content-type", "")
                    content = json.dumps(proxy.after(self.path, answer.json())).encode() if is_json else answer.content
                else:
                    content = b'{"error": {"message": "played by the proxy"}}'
                self.send_response(status)
                self.send_header("Content-Type", "application/json" if content[:1] == b"{" else "text/event-stream")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = _pass_on  # noqa: N815

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
