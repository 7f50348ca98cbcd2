"""What `kv_connector_extra_config` may say, checked at start."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from blend_rag.blend.policy import RecomputePolicy
from blend_rag.blend.selectors import make_selector
from blend_rag.engines.wire import POLICY_FIELDS
from blend_rag.errors import ConnectorError, PolicyError
from blend_rag.in_band import check_separator
from blend_rag.kv import STORE_DTYPES
from blend_rag.stores.url import parse_bytes

_RESEARCH_SELECTORS = ("oracle",)


@dataclass(frozen=True, slots=True)
class BlendSettings:
    """Settings of the connector, of the same names in `kv_connector_extra_config`.

    Attributes:
        policy: what is recomputed where a request does not say; given as `ratio`, `selector`, `check_layer`,
            `schedule`, `context` and `seed`.
        store: URL or URLs of a lasting or shared store behind the tiers in memory, as `open_store` takes them.
        allow_unsigned: open a shared store without a secret.
        store_dtype: of kept KV: "float16", "bfloat16", "float32", or "auto" for 16 bits like the model's.
        gpu_bytes: bound on chunk KV kept on each GPU, beside vLLM's own memory.
        host_bytes: bound on chunk KV kept in each worker's host memory, pinned where there is a GPU.
        separator: text that marks borders between chunks in prompts that come without segments; None looks for none.
        window: cut prompts that come without segments every so many tokens; None does not.
        namespace: KV of one namespace is never seen by another; a request that names another one is refused.
        load_timeout: seconds to wait for the store before computing instead.
        max_segments: requests with more are refused.
        self_check: prove at start that blending this model is right.
        verify_first: compare the first blended request with vLLM's own forward.

    Raises:
        ConnectorError: a setting does not exist, or its value makes no sense.
    """

    policy: RecomputePolicy = field(default_factory=RecomputePolicy)
    store: tuple[str, ...] = ()
    allow_unsigned: bool = False
    store_dtype: str = "auto"
    gpu_bytes: int = 0
    host_bytes: int = 4 << 30
    separator: str | None = None
    window: int | None = None
    namespace: str = ""
    load_timeout: float = 5.0
    max_segments: int = 1024
    self_check: bool = True
    verify_first: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> BlendSettings:
        """Settings from what the command line gave."""
        known = {field.name for field in fields(cls)} - {"policy"} | set(POLICY_FIELDS)
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
                raise ConnectorError(f"kv_connector_extra_config has no setting {name!r}: {hint}")
        return cls(
            policy=policy_from(given, RecomputePolicy()),
            store=_urls(given.get("store")),
            allow_unsigned=_flag(given, "allow_unsigned", False),
            store_dtype=_choice(given, "store_dtype", "auto", ("auto", *STORE_DTYPES)),
            gpu_bytes=_bytes(given, "gpu_bytes", 0),
            host_bytes=_bytes(given, "host_bytes", 4 << 30),
            separator=_separator(given.get("separator")),
            window=_whole(given, "window", None),
            namespace=_text(given, "namespace", ""),
            load_timeout=_seconds(given, "load_timeout", 5.0),
            max_segments=_whole(given, "max_segments", 1024) or 1024,
            self_check=_flag(given, "self_check", True),
            verify_first=_flag(given, "verify_first", False),
        )


def policy_from(given: Mapping[str, Any], default: RecomputePolicy) -> RecomputePolicy:
    """A policy from plain data, by default that of the server.

    Raises:
        ConnectorError: a value makes no sense.
    """
    values = {name: given.get(name, getattr(default, name)) for name in POLICY_FIELDS}
    try:
        policy = RecomputePolicy(
            ratio=_number("ratio", values["ratio"]),
            selector=_string("selector", values["selector"]),
            check_layer=_integer("check_layer", values["check_layer"]),
            schedule=tuple(
                (_integer("schedule", layer), _number("schedule", ratio)) for layer, ratio in values["schedule"]
            ),
            context=_string("context", values["context"]),
            seed=_integer("seed", values["seed"]),
        )
        make_selector(policy)
    except ConnectorError:
        raise
    except PolicyError as error:
        raise ConnectorError(str(error)) from error
    except (TypeError, ValueError) as error:
        raise ConnectorError("schedule is a list of [layer, ratio] pairs") from error
    if policy.selector in _RESEARCH_SELECTORS:
        raise ConnectorError(f"selector {policy.selector!r} computes a full prefill to choose: it is for research only")
    return policy


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConnectorError(f"{name} is {value!r}: give a number")
    return float(value)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConnectorError(f"{name} is {value!r}: give a whole number")
    return value


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConnectorError(f"{name} is {value!r}: give a text")
    return value


def _text(given: Mapping[str, Any], name: str, default: str) -> str:
    return _string(name, given.get(name, default))


def _choice(given: Mapping[str, Any], name: str, default: str, choices: Sequence[str]) -> str:
    value = _text(given, name, default)
    if value not in choices:
        raise ConnectorError(f"{name} is {value!r}: choose one of {', '.join(choices)}")
    return value


def _flag(given: Mapping[str, Any], name: str, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise ConnectorError(f"{name} is {value!r}: give true or false")
    return value


def _whole(given: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = given.get(name, default)
    if value is None:
        return None
    if _integer(name, value) < 1:
        raise ConnectorError(f"{name} is {value}: give 1 or more")
    return int(value)


def _seconds(given: Mapping[str, Any], name: str, default: float) -> float:
    value = _number(name, given.get(name, default))
    if not 0 < value < float("inf"):
        raise ConnectorError(f"{name} is {value}: give a number of seconds")
    return value


def _bytes(given: Mapping[str, Any], name: str, default: int) -> int:
    value = given.get(name, default)
    if isinstance(value, str) and value.strip() != "0":
        from blend_rag.errors import StoreError

        try:
            return parse_bytes(value)
        except StoreError as error:
            raise ConnectorError(f"{name}: {error}") from error
    count = _integer(name, 0 if isinstance(value, str) else value)
    if count < 0:
        raise ConnectorError(f"{name} is {count}: give 0 or more bytes")
    return count


def _urls(value: Any) -> tuple[str, ...]:
    urls = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(urls, (list, tuple)) or not all(isinstance(url, str) and url for url in urls):
        raise ConnectorError("store is no URL: give one store URL, or a list of them")
    return tuple(urls)


def _separator(value: Any) -> str | None:
    if value is None:
        return None
    check_separator(_string("separator", value))
    return str(value)
