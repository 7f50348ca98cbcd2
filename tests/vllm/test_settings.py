"""What is refused at start, and in what words; how requests without segments are cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blend_rag.blend.plan import HotKV
from blend_rag.blend.policy import RecomputePolicy
from blend_rag.errors import ConnectorError, PromptError
from blend_rag.layout import SegmentKind
from blend_rag.vllm.checks import check_config
from blend_rag.vllm.decoder import _check_attention
from blend_rag.vllm.messages import ANY_PAGE, Job, StepNews
from blend_rag.vllm.request import BlendRequest, BorderFinder, RequestParser, request_parameters
from blend_rag.vllm.scheduler import BlendScheduler, _pages_filled
from blend_rag.vllm.self_check import kv_difference
from blend_rag.vllm.settings import BlendSettings
from tests.vllm.models import bare_layout


def test_settings_are_read() -> None:
    settings = BlendSettings.of(
        {
            "ratio": 0.3,
            "selector": "k-deviation",
            "check_layer": 2,
            "store": "file:///kv",
            "gpu_bytes": "2GiB",
            "host_bytes": 1000,
            "separator": "<chunk-border>",
            "namespace": "tenant",
        }
    )
    assert settings.policy == RecomputePolicy(ratio=0.3, selector="k-deviation", check_layer=2)
    assert settings.store == ("file:///kv",)
    assert (settings.gpu_bytes, settings.host_bytes, settings.namespace) == (2 << 30, 1000, "tenant")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ration": 0.2}, "did you mean 'ratio'"),
        ({"ratio": 1.5}, "not a share"),
        ({"ratio": "much"}, "give a number"),
        ({"selector": "best"}, "choose one of"),
        ({"selector": "oracle"}, "research"),
        ({"check_layer": 0}, "layer 0"),
        ({"schedule": [1]}, "pairs"),
        ({"store": 7}, "store URL"),
        ({"store_dtype": "int8"}, "choose one of auto"),
        ({"gpu_bytes": "lots"}, "gpu_bytes"),
        ({"host_bytes": -1}, "0 or more"),
        ({"window": 0}, "1 or more"),
        ({"self_check": "yes"}, "true or false"),
        ({"load_timeout": 0}, "seconds"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_words(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConnectorError, match=words):
        BlendSettings.of(given)


def test_a_separator_that_text_would_hold_is_refused() -> None:
    with pytest.raises(PromptError, match="too easily"):
        BlendSettings.of({"separator": "##"})


def config(**changes: Any) -> Any:
    """VLLM's configuration as far as it is looked at."""
    model = SimpleNamespace(
        use_mla=False, uses_mrope=False, is_encoder_decoder=False, get_total_num_hidden_layers=lambda: 4
    )
    parallel = SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1, enable_expert_parallel=False)
    transfer = SimpleNamespace(kv_role="kv_both", kv_load_failure_policy="recompute")
    whole = SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        kv_transfer_config=transfer,
        lora_config=None,
        speculative_config=None,
    )
    for path, value in changes.items():
        part, _, name = path.partition("__")
        setattr(getattr(whole, part) if name else whole, name or part, value)
    return whole


def test_a_usual_configuration_is_accepted() -> None:
    check_config(config(), None, BlendSettings())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, "recompute"),
        ({"kv_transfer_config__kv_role": "kv_producer"}, "kv_both"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"lora_config": object()}, "LoRA"),
        ({"model_config__use_mla": True}, "latent"),
        ({"model_config__uses_mrope": True}, "multi-axis"),
        ({"model_config__is_encoder_decoder": True}, "encoder-decoder"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "speculative"),
    ],
)
def test_what_cannot_be_blended_is_refused_at_start(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConnectorError, match=words):
        check_config(config(**changes), None, BlendSettings())


def test_a_check_layer_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConnectorError, match="check layer"):
        check_config(config(), None, BlendSettings.of({"selector": "k-deviation", "check_layer": 4}))


def layer(**changes: Any) -> Any:
    impl = SimpleNamespace(sliding_window=None, logits_soft_cap=0, sinks=None, alibi_slopes=None, do_kv_cache_update=1)
    found = SimpleNamespace(num_heads=4, num_kv_heads=2, head_size=32, kv_cache_dtype="auto", impl=impl)
    for name, value in changes.items():
        setattr(impl if hasattr(impl, name) else found, name, value)
    return found


ROPE = SimpleNamespace(
    cos_sin_cache=SimpleNamespace(data_ptr=lambda: 1), rotary_dim=32, head_size=32, is_neox_style=True
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window": (64, 0)}, "sliding window"),
        ({"logits_soft_cap": 30.0}, "soft-capping"),
        ({"sinks": object()}, "sinks"),
        ({"alibi_slopes": object()}, "ALiBi"),
        ({"kv_cache_dtype": "fp8"}, "quantised"),
        ({"head_size_v": 16}, "another size"),
        ({"kv_sharing_target_layer_name": "x"}, "share"),
    ],
)
def test_attention_that_cannot_be_blended_is_refused(changes: dict[str, Any], words: str) -> None:
    _check_attention([layer()], [ROPE])
    with pytest.raises(ConnectorError, match=words):
        _check_attention([layer(**changes)], [ROPE])


def parser(borders: BorderFinder | None = None, **given: Any) -> RequestParser:
    return RequestParser(BlendSettings.of(given), borders, 1000, 512)


def letters(text: str) -> tuple[list[int], BorderFinder]:
    """A tokenizer of one token a letter, in which neighbours of a border merge with it."""
    pieces = []
    at = 0
    while at < len(text):
        width = 2 if text[at : at + 2] in ("><", "a<", ">b") else 1
        pieces.append(text[at : at + width])
        at += width
    names = sorted(set(pieces))
    return [names.index(piece) for piece in pieces], BorderFinder("<br>", lambda token_id: names[token_id])


def kinds(request: BlendRequest | None) -> list[str]:
    assert request
    return [segment.kind.value for segment in request.layout.segments]


def test_single_separators_divide_passages() -> None:
    ids, borders = letters("system<br>one<br>two<br>why")
    request = parser(borders).parse(ids, None)
    assert kinds(request) == ["prefix", "separator", "chunk", "separator", "chunk", "separator", "question"]


def test_doubled_separators_enclose_passages_even_where_borders_merge() -> None:
    ids, borders = letters("system<br><br>big data<br> and <br><br>two<br>why")
    request = parser(borders).parse(ids, None)
    assert [kind for kind in kinds(request) if kind != "separator"] == ["prefix", "chunk", "glue", "chunk", "question"]
    assert request
    assert request.layout.context_ids == tuple(ids[: len("system")])


def test_text_without_separators_is_left_alone() -> None:
    ids, borders = letters("nothing to see")
    assert parser(borders).parse(ids, None) is None
    assert parser(borders).parse(ids, {"do_remote_prefill": True}) is None


def test_parameters_of_a_layout_are_parsed_back() -> None:
    layout = bare_layout([("prefix", 4), ("chunk", 9), ("separator", 1), ("chunk", 5), ("question", 3)])
    policy = RecomputePolicy(ratio=0.4, selector="first-k")
    request = parser().parse(layout.token_ids, request_parameters(layout, policy=policy))
    assert request
    assert (request.policy, request.layout.token_ids, request.layout.context_ids) == (
        policy,
        layout.token_ids,
        layout.context_ids,
    )
    assert [len(segment) for segment in request.layout.of_kind(SegmentKind.CHUNK)] == [9, 5]


def test_another_context_travels_with_the_request() -> None:
    layout = bare_layout([("question", 4), ("chunk", 9), ("question", 3)])
    params = request_parameters(type(layout)(layout.token_ids, layout.segments, (7, 8, 9)))
    request = parser().parse(layout.token_ids, params)
    assert request
    assert request.layout.context_ids == (7, 8, 9)


def output(new: Any = (), cached: Any = (), scheduled: dict[str, int] | None = None) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(cached), new_block_ids=[None for _ in cached]),
        num_scheduled_tokens=scheduled or {},
        finished_req_ids=set(),
    )


def test_pages_that_a_step_fills_are_named() -> None:
    new = SimpleNamespace(req_id="a", num_computed_tokens=32, block_ids=([10, 11, 12, 13],))
    assert _pages_filled(output([new], scheduled={"a": 20}), 16) == {12, 13}
    assert ANY_PAGE in _pages_filled(output(cached=["b"], scheduled={"b": 40}), 16)
    assert _pages_filled(output(cached=["b"], scheduled={"b": 1}), 16) == set()


def arriving(name: str, layout: Any, **params: Any) -> Any:
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params={**request_parameters(layout), **params},
        prompt_token_ids=list(layout.token_ids),
        sampling_params=SimpleNamespace(prompt_logprobs=None),
        lora_request=None,
        mm_features=[],
        block_hashes=[bytes([i] * 32) for i in range(len(layout) // 8)],
        skip_reading_prefix_cache=False,
    )


def scheduler(**given: Any) -> BlendScheduler:
    settings = BlendSettings.of(given)
    return BlendScheduler(settings, RequestParser(settings, None, 1000, 512), 8, True)


LAYOUT = bare_layout([("prefix", 20), ("chunk", 30), ("question", 10)])


def test_only_pages_that_may_be_approximate_get_other_hashes() -> None:
    request = arriving("a", LAYOUT)
    before = list(request.block_hashes)
    scheduler().on_new_request(request)
    assert [old == new for old, new in zip(before, request.block_hashes, strict=True)] == [True, True, *[False] * 5]


def test_a_namespace_salts_every_page() -> None:
    plain, tenant = arriving("a", LAYOUT), arriving("b", LAYOUT)
    plain.kv_transfer_params = tenant.kv_transfer_params = None
    scheduler().on_new_request(plain)
    scheduler(namespace="tenant").on_new_request(tenant)
    assert not set(plain.block_hashes) & set(tenant.block_hashes)


def test_the_same_blend_waits_for_the_one_under_way_and_a_failed_one_is_not_tried_again() -> None:
    half = scheduler()
    first, second = arriving("a", LAYOUT), arriving("b", LAYOUT)
    for request in (first, second):
        half.on_new_request(request)
    assert half.matched_tokens(first, 0) == (59, True)
    half.after_alloc(first, (list(range(8)),), 59)
    assert half.matched_tokens(second, 0) == (None, False)
    orders = half.orders(output())
    assert orders.jobs == [Job("a", orders.jobs[0].request, tuple(range(8)), 0)]
    half.hear(StepNews({"a": {"error": "broken"}}))
    assert half.matched_tokens(first, 0) == (0, False)
    assert half.matched_tokens(second, 0) == (59, True)
    assert half.finished(first) == {"blend_rag": {"error": "broken"}}


def test_other_kv_than_vllms_is_noticed() -> None:
    generator = torch.Generator().manual_seed(0)
    layers = tuple(torch.randn(2, 9, 8, generator=generator) for _ in range(4))
    right = HotKV(9, layers[:2], layers[2:])
    assert kv_difference(right, right) == 0
    wrong = HotKV(9, (layers[0], layers[1].roll(1, dims=1)), layers[2:])
    assert kv_difference(wrong, right) > 0.5


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (LAYOUT, {"context_ids": [5, 512]}),  # no such token
        (LAYOUT, {"context_ids": [10**30]}),
        (LAYOUT, {"context_ids": [3] * 980}),  # the chunk behind it would end beyond the last position
        (bare_layout([("question", 600), ("chunk", 300), ("question", 10)]), {}),  # so would the question, repeated
    ],
)
def test_nothing_is_read_beyond_the_models_tables(layout: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(ConnectorError, match=r"no token id|positions"):
        parser().parse(layout.token_ids, {**request_parameters(layout), **changes})


@pytest.mark.parametrize("params", [7, {"segments": {"a": 1}}, {"segments": [[[], 1]]}, {"seed": 1, "schedule": 5}])
def test_no_parameters_stop_the_engine(params: Any) -> None:
    half = scheduler(window=16)
    request = arriving("a", LAYOUT)
    request.kv_transfer_params = params
    half.on_new_request(request)
    assert half.matched_tokens(request, 0) == (0, False)
    assert half.stats.data["requests"] == {"refused": 1}


def test_warming_again_is_not_answered_by_pages() -> None:
    half = scheduler()
    first, second = arriving("a", LAYOUT, warm=True), arriving("b", LAYOUT, warm=True)
    half.on_new_request(first)
    half.on_new_request(second)
    assert not set(first.block_hashes[2:]) & set(second.block_hashes[2:])
