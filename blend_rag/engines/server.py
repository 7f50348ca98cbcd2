"""An engine that is a running vLLM server with the connector, asked over its OpenAI-compatible API."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from blend_rag.blend.policy import RecomputePolicy
from blend_rag.engines.base import Engine
from blend_rag.engines.loading import load_tokenizer
from blend_rag.engines.requests import Ask, Piece, RequestEngine
from blend_rag.engines.wire import Command
from blend_rag.errors import ModelError, ServerError, ServerTimeoutError, ServerUnreachableError

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "VLLM_API_KEY"
_SAMPLE = "Straße 12, naïve — 你好 🙂\n\tdef f(x): return x ** 2  <|im_end|> </s> [INST] 1,000.50"
_BUSY = (429, 500, 502, 503, 504)


class ServerEngine(RequestEngine):
    """Answers prompts on a vLLM server that runs the connector (`blend-rag serve`). Chunk KV lies with the server.

    Args:
        url: of the server, with or without `/v1`.
        model: folder or hub id of the served model, for its tokenizer; by default what the server calls its root.
        served_model: the name it is served under; by default the first.
        policy: what is recomputed where a call does not say; by default the server's.
        namespace: must be the server's; None takes it as it is.
        api_key: by default `VLLM_API_KEY` of the environment.
        timeout: longest silence of the server in an answer, in seconds.
        max_retries: how often a request is repeated that met no server, an overloaded one or a broken connection.
        max_concurrency: requests under way at once, of one batch or one warming.
        warm_patience: how long warming waits for a server that is gone, in seconds: time for it to start again.

    Raises:
        ServerUnreachableError: there is no server.
        ServerError: it refuses the key, or runs without the connector.
        ModelError: the tokenizer cannot be found, or is another than the server's.
    """

    def __init__(
        self,
        url: str,
        model: str | Path | None = None,
        *,
        served_model: str | None = None,
        policy: RecomputePolicy | None = None,
        namespace: str | None = None,
        api_key: str | None = None,
        timeout: float = 300.0,
        max_retries: int = 4,
        max_concurrency: int = 32,
        warm_patience: float = 600.0,
    ) -> None:
        super().__init__("blend-rag-server")
        self._report_early = True
        self.url = url.rstrip("/").removesuffix("/v1")
        self.namespace = namespace
        self._max_retries = max_retries
        self._concurrency = max_concurrency
        self._warm_patience_s = warm_patience
        key = api_key or os.environ.get(API_KEY_VARIABLE)
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=max_concurrency),
        )
        try:
            self._loop.run(self._open(model, served_model, policy))
        except BaseException:
            self.close()
            raise

    async def _open(self, model: str | Path | None, served_model: str | None, policy: RecomputePolicy | None) -> None:
        card = await self._served(served_model)
        self.model_name = str(card["id"])
        self.max_model_len = int(card["max_model_len"])
        self.tokenizer = load_tokenizer(str(model or card.get("root") or card["id"]))
        await self._check_tokenizer()
        about = await self._again(lambda: self._command(Command.ABOUT))
        if not about:
            msg = (
                f"the server at {self.url} runs without blend-rag's connector: start it with "
                f"`blend-rag serve {card.get('root') or self.model_name}`"
            )
            raise ServerError(msg)
        self.about: dict[str, Any] = about
        self.policy = policy or _policy_of(about["policy"])
        self._checked(None)

    async def _served(self, name: str | None) -> dict[str, Any]:
        """What the server says of the model."""
        listed = await self._again(lambda: self._json("GET", "/v1/models"))
        cards: list[dict[str, Any]] = [card for card in listed.get("data", []) if "max_model_len" in card]
        for card in cards:
            if name in (None, card["id"]):
                return card
        there = ", ".join(str(card["id"]) for card in cards)
        msg = f"{self.url} serves {there}, not {name}" if there else f"{self.url} is no vLLM server"
        raise ServerError(msg)

    async def _check_tokenizer(self) -> None:
        body = {"model": self.model_name, "prompt": _SAMPLE, "add_special_tokens": False}
        try:
            told = await self._again(lambda: self._json("POST", "/tokenize", body))
        except ServerUnreachableError:
            raise
        except ServerError as error:  # a router need not pass it on
            logger.warning("the tokenizer could not be compared with the server's (%s)", error)
            return
        if told.get("tokens") != self.tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"]:
            msg = (
                f"the tokenizer is not the one of {self.model_name} at {self.url}: "
                "pass the served model's folder or hub id as model="
            )
            raise ModelError(msg)

    async def _aclose(self) -> None:
        await self._client.aclose()

    # Requests

    async def _pieces(self, ask: Ask) -> AsyncIterator[Piece]:
        sampling = ask.sampling
        body = {
            "model": self.model_name,
            "prompt": list(ask.token_ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": sampling.seed,
            "stop": list(sampling.stop),
            "ignore_eos": sampling.ignore_eos,
            "return_token_ids": True,
            "kv_transfer_params": ask.params,
        }
        # a router that hashes on this sends an answer's report to the server that gave the answer
        session = {"X-Session-ID": ask.params.get("id") or uuid.uuid4().hex}
        if sampling.max_tokens == 1:  # nothing to stream, and the report comes along
            data = await self._json("POST", "/v1/completions", body, session)
            yield _piece(data["choices"][0], data.get("kv_transfer_params"))
            return
        finished = False
        request = self._client.stream("POST", "/v1/completions", json={**body, "stream": True}, headers=session)
        async with self._sent(request) as lines:
            async for line in lines:
                event = line.removeprefix("data:").strip()
                if not line.startswith("data:") or event == "[DONE]":
                    continue
                data = json.loads(event)
                if "error" in data:
                    raise _refused(data["error"].get("code") or 500, str(data["error"].get("message")), self.url)
                if data["choices"]:
                    piece = _piece(data["choices"][0], None)
                    finished = finished or piece.finish_reason is not None
                    yield piece
        if not finished:
            msg = f"{self.url} broke off in the middle of an answer"
            raise ServerUnreachableError(msg)

    async def _json(
        self, method: str, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        async with self._sent(self._client.stream(method, path, json=body, headers=headers)) as lines:
            text = "\n".join([line async for line in lines])
        try:
            found: dict[str, Any] = json.loads(text)
        except ValueError as error:
            msg = f"{self.url}{path} does not answer as an OpenAI-compatible server does"
            raise ServerError(msg) from error
        return found

    def _sent(self, exchange: Any) -> _Exchange:
        return _Exchange(exchange, self.url)

    async def _again(self, work: Callable[[], Any], patience_s: float | None = None) -> Any:
        """Repeat work that met no server, waiting longer each time; with patience as long as that lasts."""
        started, attempt = time.monotonic(), 0
        while True:
            try:
                return await work()
            except ServerUnreachableError:
                attempt += 1
                gone = time.monotonic() - started
                if gone > patience_s if patience_s is not None else attempt > self._max_retries:
                    raise
                await asyncio.sleep(min(8.0, 0.25 * 2**attempt) * random.uniform(0.5, 1.0))


class _Exchange:
    """A request and its answer's lines; every failure becomes an error of ours."""

    def __init__(self, exchange: Any, url: str) -> None:
        self._exchange = exchange
        self._url = url

    async def __aenter__(self) -> AsyncIterator[str]:
        with _failures(self._url):
            response = await self._exchange.__aenter__()
        if response.status_code >= 400:
            try:
                with _failures(self._url):
                    text = (await response.aread()).decode(errors="replace")
            finally:
                await self._exchange.__aexit__(None, None, None)
            raise _refused(response.status_code, _message(text), self._url)
        return self._lines(response)

    async def _lines(self, response: httpx.Response) -> AsyncIterator[str]:
        with _failures(self._url):
            async for line in response.aiter_lines():
                yield line

    async def __aexit__(self, *exc: Any) -> None:
        await self._exchange.__aexit__(*exc)


@contextmanager
def _failures(url: str) -> Iterator[None]:
    """Turn httpx's errors into ours."""
    try:
        yield
    except httpx.ReadTimeout as error:
        msg = f"{url} did not answer in time: pass a longer timeout=, or lighten the server's load"
        raise ServerTimeoutError(msg) from error
    except httpx.UnsupportedProtocol as error:
        msg = f"{url} is no URL of a server: give http://host:port"
        raise ServerError(msg) from error
    except httpx.TransportError as error:
        msg = f"{url} cannot be reached ({type(error).__name__}: {error}): is the server running?"
        raise ServerUnreachableError(msg) from error


def _refused(status: int, message: str, url: str) -> ServerError:
    if status in (401, 403):
        return ServerError(f"{url} refuses the API key: pass api_key=, or set {API_KEY_VARIABLE}")
    if status in _BUSY:
        return ServerUnreachableError(f"{url} cannot answer now ({status}: {message})")
    return ServerError(f"{url} refuses the request ({status}: {message})")


def _message(text: str) -> str:
    try:
        data = json.loads(text)
        found = data.get("error", data)
        return str(found.get("message", found) if isinstance(found, dict) else found)[:500]
    except (ValueError, AttributeError):
        return " ".join(text.split())[:200]


def _piece(choice: dict[str, Any], told: dict[str, Any] | None) -> Piece:
    if choice.get("token_ids") is None:
        msg = "the server does not return token ids: use a version of vLLM that is listed as tested"
        raise ServerError(msg)
    return Piece(choice["token_ids"], choice.get("finish_reason"), choice.get("stop_reason"), told)


def _policy_of(told: dict[str, Any]) -> RecomputePolicy:
    schedule = tuple((int(layer), float(ratio)) for layer, ratio in told["schedule"])
    return RecomputePolicy(**{**told, "schedule": schedule})


_engine_type: type[Engine] = ServerEngine  # keeps the class true to the protocol
