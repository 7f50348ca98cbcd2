"""Servers shared by the tests of this folder. A start takes half a minute: two servers, one of them started again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from pydoc_data import topics

import pytest

from blend_rag import Passage, PromptBuilder
from blend_rag.engines.server import ServerEngine
from tests.server.processes import PYTHON, Proxy, VLLMServer
from tests.stores.redis_server import PROGRAM, RedisServer

KEY = "open sesame"
BORDER = "<chunk-border>"


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if not PROGRAM:
        pytest.skip("redis-server is not installed")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def servers(
    smollm2: Path, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VLLMServer, VLLMServer]]:
    """Two servers over one Redis: the first wants a key, the second is there to be killed."""
    if not PYTHON or not shutil.which(PYTHON):
        pytest.skip("BLEND_RAG_VLLM_PYTHON names no environment with vLLM")
    folder = tmp_path_factory.mktemp("servers")
    store = ["--store", redis_server.url(put_deadline=20, deadline=20)]
    first = VLLMServer(smollm2, folder, *store, api_key=KEY)
    second = VLLMServer(smollm2, folder, *store)
    try:
        first.start()
        first.wait()
        second.start()
        yield first, second
    finally:
        first.stop()
        second.stop()


@pytest.fixture(scope="session")
def server(servers: tuple[VLLMServer, VLLMServer]) -> VLLMServer:
    return servers[0]


@pytest.fixture(scope="session")
def mortal(servers: tuple[VLLMServer, VLLMServer]) -> VLLMServer:
    """The server that tests kill; they start it again."""
    servers[1].wait()
    return servers[1]


@pytest.fixture
def remote(server: VLLMServer) -> Iterator[ServerEngine]:
    with closing(ServerEngine(server.url, api_key=KEY)) as engine:
        yield engine


@pytest.fixture
def proxy(server: VLLMServer) -> Iterator[Proxy]:
    with closing(Proxy(server.url)) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def passages(prompts: PromptBuilder) -> list[Passage]:
    """Real text in passages of 90 tokens, each a document."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = prompts.tokenizer.literal(text)
    cut = [prompts.tokenizer.decode(ids[at : at + 90]) for at in range(0, 90 * 120, 90)]
    return [Passage(text, document=f"document {number}") for number, text in enumerate(cut)]
