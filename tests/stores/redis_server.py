"""A real redis-server for tests."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from pathlib import Path

from tests.stores.cases import wait_for

PROGRAM = shutil.which("redis-server")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """`redis-server` in memory on a free port; `start` after `kill` gives an empty one at the same port."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.settings = settings
        self.start()

    def start(self) -> None:
        command = [PROGRAM, "--port", str(self.port), "--save", "", "--appendonly", "no", "--dir", str(self.folder)]
        self.process = subprocess.Popen([*command, *self.settings], stdout=subprocess.DEVNULL)
        wait_for(self.listens)

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def url(self, user: str = "", **options: object) -> str:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"redis://{user}127.0.0.1:{self.port}/0?{query}"
