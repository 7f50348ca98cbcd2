"""Put and get bandwidth of every tier, beside a plain safetensors write and read in the same run.

    python benchmarks/stores.py --json build/bench/stores.json

A round writes and reads the chunks of prompts with every arm in turn; figures are medians over rounds. Reading a prompt
ends with its chunks in memory of their own, all held until the last one is there, as an engine holds them while it
blends. Files were written shortly before, so reads come from the page cache. Shared tiers are signed.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm

from blend_rag.errors import StoreError
from blend_rag.kv import ChunkKey, ChunkKV
from blend_rag.stores import DiskStore, KVStore, MemoryStore, open_store

SHAPES = {  # layers, KV heads, head size of 256-token chunks
    "SmolLM2-135M": (30, 3, 64),
    "8B (Llama 3)": (32, 8, 128),
}
SECRET = "a secret for this run alone"
PLAIN = "plain safetensors"


@dataclass(frozen=True)
class Arm:
    """One way to write chunk number i, and to read it into a tensor."""

    put: Callable[[int], object]
    get: Callable[[int], torch.Tensor]


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts written and read per round.")] = 4,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks per prompt.")] = 16,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    folder: Annotated[Path | None, typer.Option(help="On the disk to measure. Left out: the temporary folder.")] = None,
) -> None:
    """Measure all tiers that this machine has."""
    rows = []
    with tempfile.TemporaryDirectory(dir=folder) as name, redis_server() as port:
        for shape, sizes in SHAPES.items():
            for tier, figures in measure(sizes, Path(name) / shape.split()[0], port, prompts, chunks, rounds).items():
                rows.append({"shape": shape, "tier": tier, **figures})
    console = Console()
    table = Table("chunk", "tier", "put GB/s", "get GB/s", "put ÷ plain", "get ÷ plain")
    for row in rows:
        figures = (f"{row[name]:.2f}" for name in ("put_gb_s", "get_gb_s", "put_ratio", "get_ratio"))
        table.add_row(f"{row['shape']}, {row['chunk_mb']:.1f} MB", row["tier"], *figures)
    console.print(table)
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps({**settings(prompts, chunks, rounds), "rows": rows}, indent=2) + "\n")


def measure(
    sizes: tuple[int, int, int], folder: Path, port: int | None, prompts: int, chunks: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Bandwidths and ratios to plain safetensors, by tier."""
    layers, heads, size = sizes
    torch.manual_seed(0)
    base = torch.randn(layers, 2, 256, heads, size).half()
    everything = range(prompts * chunks)  # no two prompts share a chunk
    data = [base + number / 64 for number in everything]
    keys = [ChunkKey.of((number,), fingerprint="benchmark", dtype="float16") for number in everything]
    stores = dict(open_tiers(folder, port))
    arms = {PLAIN: plain(folder / "plain", data), "plain safetensors, flushed": plain(folder / "flushed", data, True)}
    arms |= {name: of_store(store, keys, data) for name, store in stores.items()}
    puts: dict[str, list[float]] = {name: [] for name in arms}
    gets: dict[str, list[float]] = {name: [] for name in arms}
    for _ in tqdm(range(rounds + 1), desc=folder.name, leave=False):  # the first round warms up
        for name, arm in arms.items():
            puts[name].append(timed(lambda arm=arm: [arm.put(number) for number in everything]) / len(everything))
        for name, arm in arms.items():
            seconds = timed(lambda arm=arm: [read_prompt(arm, everything[i::prompts]) for i in range(prompts)])
            gets[name].append(seconds / len(everything))
    for number in everything:
        assert all(torch.equal(arm.get(number), data[number]) for arm in arms.values()), (
            "every tier gives the same bits"
        )
    for store in stores.values():
        store.close()
    shutil.rmtree(folder)
    nbytes = base.numel() * base.element_size()
    return {
        name: {
            "chunk_mb": nbytes / 1e6,
            "put_gb_s": nbytes / statistics.median(puts[name][1:]) / 1e9,
            "get_gb_s": nbytes / statistics.median(gets[name][1:]) / 1e9,
            "put_ratio": ratio(puts[PLAIN], puts[name]),
            "get_ratio": ratio(gets[PLAIN], gets[name]),
        }
        for name in arms
    }


def ratio(plain_seconds: list[float], seconds: list[float]) -> float:
    """Median over rounds of plain time by this arm's time in the same round."""
    return statistics.median(a / b for a, b in zip(plain_seconds[1:], seconds[1:], strict=True))


def read_prompt(arm: Arm, chunks: Sequence[int]) -> None:
    """All chunks of a prompt in memory of their own, held together."""
    held = [arm.get(number).clone() for number in chunks]
    del held


def plain(folder: Path, data: list[torch.Tensor], flush: bool = False) -> Arm:
    """A file per chunk, written and read by safetensors; with `flush`, on the disk when `put` returns."""
    folder.mkdir(parents=True)

    def put(number: int) -> None:
        path = folder / str(number)
        save_file({"kv": data[number]}, path)
        if flush:
            with path.open("rb") as file:
                os.fsync(file.fileno())

    return Arm(put, lambda number: load_file(folder / str(number))["kv"])


def of_store(store: KVStore, keys: list[ChunkKey], data: list[torch.Tensor]) -> Arm:
    """A store's own put and get."""

    def get(number: int) -> torch.Tensor:
        kv = store.get(keys[number])
        assert kv is not None, f"{store} lost a chunk: {store.why_missing(keys[number])}"
        return kv.data

    return Arm(lambda number: store.put(keys[number], ChunkKV(data[number])), get)


def open_tiers(folder: Path, port: int | None) -> Iterator[tuple[str, KVStore]]:
    """The tiers that can be opened here."""
    yield "memory", MemoryStore(8 << 30)
    yield "disk, verified", DiskStore(folder / "disk", 32 << 30)
    urls = {f"lmcache fs {_installed('lmcache')}": f"lmcache+fs://{folder / 'lmcache'}?deadline=20"}
    if port:
        urls |= {
            "redis": f"redis://127.0.0.1:{port}/0?deadline=20",
            f"lmcache resp {_installed('lmcache')}": f"lmcache+resp://127.0.0.1:{port}?deadline=20&num_workers=4",
        }
    for name, url in urls.items():
        try:
            yield name, open_store([url], secret=SECRET)
        except StoreError as error:
            Console(stderr=True).print(f"left out: {name}: {error}", soft_wrap=True)


@contextmanager
def redis_server() -> Iterator[int | None]:
    """Port of a redis-server in memory, if there is the program."""
    program = shutil.which("redis-server")
    if not program:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [program, "--port", str(port), "--save", "", "--appendonly", "no"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        time.sleep(1)
        yield port
    finally:
        server.kill()
        server.wait()


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` took."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def settings(prompts: int, chunks: int, rounds: int) -> dict[str, object]:
    """What the figures depend on."""
    return {
        "device": f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)",
        "versions": {name: _installed(name) for name in ("blend-rag", "torch", "safetensors", "redis", "lmcache")},
        "prompts": prompts,
        "chunks": chunks,
        "rounds": rounds,
    }


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    typer.run(main)
