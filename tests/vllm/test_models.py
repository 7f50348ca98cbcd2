"""Other architectures, scaled RoPE and tensor parallelism, on tiny models with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.vllm.models import bare_layout, make_model
from tests.vllm.serving import Answer, Served, ask_of, assert_same, far_apart

SPEC = [("prefix", 40), ("chunk", 70), ("chunk", 50), ("chunk", 60), ("question", 20)]
SHUFFLED = [SPEC[0], SPEC[3], SPEC[1], SPEC[2], SPEC[4]]
FIRST = bare_layout(SPEC, share={0: 1, 1: 2, 2: 3, 3: 4, 4: 5})
SECOND = bare_layout(SHUFFLED, share={0: 1, 1: 4, 2: 2, 3: 3, 4: 6})
OPTIONS = {"skip_tokenizer_init": True, "max_model_len": 1024, "max_num_batched_tokens": 1024}
ASKING = {"detokenize": False}
PARTIAL: dict[str, Answer] = {}


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "mistral", "llama3"])
def tiny(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[tuple[str, Served]]:
    """One engine after the other; llama3 comes last and leaves its KV for tensor parallelism."""
    settings = {"store": f"file://{folders['store']}"}
    with closing(Served(make_model(request.param, folders[request.param]), settings, **OPTIONS)) as served:
        yield request.param, served


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp(name) for name in ("qwen2", "qwen3", "mistral", "llama3", "store")}


def check(served: Served) -> Answer:
    """R = 1 is exact over stored chunks in a new order, r = 0 is not; what 30 % gives."""
    served.ask(ask_of(FIRST, warm=True), tokens=1, **ASKING)
    [plain] = served.ask(SECOND.token_ids, **ASKING)
    [exact] = served.ask(ask_of(SECOND, ratio=1.0), **ASKING)
    assert_same(exact, plain)
    assert exact.report["misses"] == {}
    assert far_apart(served.ask(ask_of(SECOND, ratio=0.0), **ASKING)[0], plain)
    return served.ask(ask_of(SECOND, ratio=0.3), **ASKING)[0]


def scale_weights(model: torch.nn.Module) -> None:
    """What a trainer does between two rounds, as far as a cache can tell."""
    for parameter in model.parameters():
        parameter.data.mul_(1.1)


def check_new_weights(served: Served) -> None:
    """After a reset KV in memory is gone, and KV of other weights is never met."""
    served.llm.reset_prefix_cache(reset_connector=True)
    [found] = served.ask(ask_of(SECOND, ratio=0.3), **ASKING)
    assert {chunk["tier"] for chunk in found.report["chunks"]} == {"store"}
    served.llm.apply_model(scale_weights)
    served.llm.reset_prefix_cache(reset_connector=True)
    [plain] = served.ask(SECOND.token_ids, **ASKING)
    [found] = served.ask(ask_of(SECOND, ratio=0.3), **ASKING)
    assert found.report["misses"] == {"other model": 3}
    assert_same(found, plain)  # all of it is computed


def test_every_architecture_is_exact_at_full_ratio(tiny: tuple[str, Served]) -> None:
    name, served = tiny
    PARTIAL[name] = check(served)


def test_one_rank_warms_two(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    if "llama3" not in PARTIAL:
        pytest.skip("the engine with one rank did not run")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # else two ranks want two NUMA nodes
    settings = {"store": f"file://{folders['store']}"}
    with closing(Served(folders["llama3"], settings, tensor_parallel_size=2, **OPTIONS)) as served:
        [first] = served.ask(ask_of(SECOND, ratio=0.3), **ASKING)
        assert {chunk["tier"] for chunk in first.report["chunks"]} == {"store"}
        assert first.report["recomputed"] == PARTIAL["llama3"].report["recomputed"]
        assert_same(first, PARTIAL["llama3"])
        other = bare_layout(SPEC, seed=9)
        [plain] = served.ask(other.token_ids, **ASKING)
        [new] = served.ask(ask_of(other, ratio=1.0), **ASKING)
        assert_same(new, plain)
        check(served)
        check_new_weights(served)
