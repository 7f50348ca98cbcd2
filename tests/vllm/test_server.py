"""A real server process, started as users start it, asked over HTTP."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from blend_rag import PromptBuilder
from tests.vllm.serving import CONNECTOR, Answer, Served, ask_of, assert_same

BORDER = "<chunk-border>"


@pytest.fixture(scope="module")
def url(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    transfer = {
        **CONNECTOR,
        "kv_connector_extra_config": {"separator": BORDER, "namespace": "tenant", "verify_first": True},
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2)]
    command += ["--served-model-name", "smollm2", "--dtype", "float32", "--max-model-len", "2048"]
    command += ["--block-size", "32", "--port", str(port), "--kv-transfer-config", json.dumps(transfer)]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ})
        try:
            for _ in range(300):
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def complete(url: str, prompt: object, params: dict | None = None, **options: object) -> tuple[Answer, dict]:
    body = {"model": "smollm2", "prompt": prompt, "temperature": 0, "max_tokens": 8, "logprobs": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, **({"kv_transfer_params": params} if params else {}), **options}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    response.raise_for_status()
    data = response.json()
    choice = data["choices"][0]
    report = (data.get("kv_transfer_params") or {}).get("blend_rag", {})
    return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"], 0, report, choice["text"]), data


def test_segments_travel_in_the_request_and_the_report_comes_back(
    url: str, plain: Served, prompts: PromptBuilder, texts: list[str]
) -> None:
    reports = []
    for question in ("What is a string?", "What is a tuple?", "What is a list?"):
        layout = prompts.build(passages=texts[0:3], question=question)
        ids, params = ask_of(layout, ratio=1.0)
        found, _ = complete(url, list(ids), params)
        assert_same(found, plain.ask(ids)[0])  # compiled here, eager there
        reports.append(found.report)
    assert "to verify blending" in reports[0]["error"]  # the first one was vLLM's own
    assert reports[1]["prompt_tokens"] == sum(reports[1]["tokens"].values())
    assert reports[2]["misses"] == {}


def test_plain_requests_are_plain(url: str, plain: Served, prompts: PromptBuilder, texts: list[str]) -> None:
    layout = prompts.build(passages=texts[0:3], question="What is a list?")
    found, _ = complete(url, list(layout.token_ids))
    assert_same(found, plain.ask(layout.token_ids)[0])
    assert found.report == {}


def chat(url: str, texts: list[str], question: str, **options: object) -> httpx.Response:
    passages = "".join(f"{BORDER}{BORDER}{text}{BORDER}" for text in texts)
    body = {"model": "smollm2", "temperature": 0, "max_tokens": 24, **options}
    body["messages"] = [{"role": "user", "content": f"Passages:{passages}\n{question}"}]
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)


def test_a_client_that_only_sends_text_gets_reuse_through_separators(url: str, texts: list[str]) -> None:
    chat(url, texts[3:6], "What is a set?").raise_for_status()
    report: dict = {}
    for _ in range(20):  # new chunks are kept after the answer
        data = chat(url, [texts[5], texts[3]], f"What is a dictionary? {_}").json()
        report = data["kv_transfer_params"]["blend_rag"]
        if not report["misses"]:
            break
        time.sleep(0.5)
    assert report["misses"] == {}
    assert report["tokens"]["host"] > 100
    assert BORDER not in data["choices"][0]["message"]["content"]


def test_streams_arrive_in_pieces(url: str, texts: list[str]) -> None:
    body = {"model": "smollm2", "temperature": 0, "max_tokens": 32, "stream": True, "ignore_eos": True}
    passages = "".join(f"{BORDER}{BORDER}{text}{BORDER}" for text in texts[6:9])
    body["messages"] = [{"role": "user", "content": f"Passages:{passages}\nWhy?"}]
    began, times = time.perf_counter(), []
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as response:
        times = [
            time.perf_counter() - began for line in response.iter_lines() if '"content":"' in line.replace(" ", "")
        ]
    assert len(times) > 8
    assert times[0] < times[-1]


def test_a_client_that_hangs_up_disturbs_nobody(
    url: str, plain: Served, prompts: PromptBuilder, texts: list[str]
) -> None:
    layout = prompts.build(passages=texts[10:18], question="Who?")
    ids, params = ask_of(layout)
    body = {"model": "smollm2", "prompt": list(ids), "max_tokens": 500, "kv_transfer_params": params}
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{url}/v1/completions", json=body, timeout=0.05)
    other = prompts.build(passages=texts[18:20], question="Who?")
    ids, params = ask_of(other, ratio=1.0)
    assert_same(complete(url, list(ids), params)[0], plain.ask(ids)[0])


def test_metrics_are_on_the_servers_page(url: str) -> None:
    page = httpx.get(f"{url}/metrics").text
    for name in ("requests", "tokens", "hits", "misses", "bytes"):
        assert re.search(rf"^vllm:blend_rag_{name}_total{{.*}} [1-9]", page, re.MULTILINE), name
    assert re.search(r'^vllm:blend_rag_seconds_count{.*phase="blend".*} [1-9]', page, re.MULTILINE)
    assert re.search(r'^vllm:blend_rag_requests_total{.*outcome="blended".*} [1-9]', page, re.MULTILINE)


def test_the_first_request_was_compared_with_what_vllm_computes(url: str) -> None:
    page = httpx.get(f"{url}/metrics").text
    assert re.search(r'^vllm:blend_rag_requests_total{.*outcome="verified".*} 1', page, re.MULTILINE)
