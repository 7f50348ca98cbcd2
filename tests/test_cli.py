"""The command as a user runs it: a process of its own, with an exit status."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import blend_rag
from blend_rag.engines.vllm_setup import Machine, Memory, installed_vllm


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from blend_rag.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, check=False)


def test_version_and_help() -> None:
    assert run("--version").stdout.strip() == blend_rag.__version__
    page = run("--help").stdout
    assert all(command in page for command in ("demo", "ask", "doctor"))


def test_doctor_proves_reuse_at_another_position(smollm2: Path) -> None:
    done = run("doctor", "--model", str(smollm2), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    assert report["ok"]
    assert {"torch", "transformers", "self-test", "reuse at another position", "agreement with full prefill"} <= set(
        checks
    )
    assert "recomputed" in checks["reuse at another position"]["detail"]


def test_doctor_fails_with_what_to_do(tmp_path: Path) -> None:
    done = run("doctor", "--model", str(tmp_path))
    assert done.returncode == 1
    assert "FAIL" in done.stdout
    assert "no config.json" in done.stdout


@pytest.mark.slow
def test_ask_answers_from_documents_as_json(tmp_path: Path) -> None:
    (tmp_path / "towers.txt").write_text("The lighthouse on the northern cape was finished in 1871.\n")
    (tmp_path / "boats.md").write_text("The ferry to the islands leaves at six in the morning.\n")
    questions = ("When was the lighthouse finished?", "When does the ferry leave?")
    done = run("ask", *questions, "--docs", str(tmp_path), "--json", "--max-tokens", "24")
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)["answers"]
    assert [answer["question"] for answer in answers] == list(questions)
    assert "1871" in answers[0]["answer"]
    assert set(answers[0]["sources"]) == {"towers.txt#1", "boats.md#1"}
    assert all(answer["report"]["misses"] == {} for answer in answers)
    assert answers[1]["report"]["recomputed_tokens"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ask", " "), "question is empty"),
        (("ask", "Who?", "--docs", "no-such-folder"), "no file or folder no-such-folder"),
        (("ask", "Who?", "--model", "no/such/model"), "there is no model at no/such/model"),
        (("ask", "Who?", "--ratio", "2"), "choose 0"),
        (("ask", "Who?", "--selector", "magic"), "choose one of k-deviation"),
    ],
)
def test_bad_input_is_one_line_and_a_non_zero_exit(arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert words in lines[0]
    assert "Traceback" not in done.stderr


def test_unwritable_cache_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = run("ask", "Who?", BLEND_RAG_CACHE=str(tmp_path / "file" / "cache"))
    assert done.returncode == 1
    assert "set BLEND_RAG_CACHE to another folder" in done.stderr


def test_serve_prints_a_command_for_this_machine_that_vllm_takes(smollm2: Path) -> None:
    result = run("serve", str(smollm2), "--store", "redis://host:6379/0", "--ratio", "0.3", "--max-model-len", "4096")
    assert result.returncode == 0
    words = shlex.split(result.stdout)
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert config["kv_connector_module_path"] == "blend_rag.vllm.connector"
    assert config["kv_load_failure_policy"] == "recompute"
    settings = config["kv_connector_extra_config"]
    assert settings["store"] == ["redis://host:6379/0"]
    assert settings["ratio"] == 0.3
    assert settings["separator"] == "<chunk-border>"
    assert "selector" not in settings, "what is the default is left to the server"
    assert words[-2:] == ["--max-model-len", "4096"]
    parsed = json.loads(run("serve", str(smollm2), "--json", "--dtype", "bfloat16").stdout)
    assert parsed["arguments"].count("--dtype") == 1, "what the user says goes before ours"


@pytest.mark.parametrize(("gpu", "ranks"), [(80, 1), (80, 8), (141, 1), (24, 1)])
def test_memory_of_a_gpu_is_shared_out_with_room_for_a_blend(gpu: int, ranks: int) -> None:
    memory = Memory.of(Machine(gpu << 30, 512 << 30), ranks)
    free = (1 - memory.gpu_memory_utilization) * gpu
    assert memory.gpu_bytes / 2**30 + 2 < free, "vLLM checks that tier and blend fit beside its own"
    assert memory.host_bytes * ranks <= 128 << 30


def test_serve_needs_vllm_only_to_run(smollm2: Path) -> None:
    if installed_vllm():
        pytest.skip("vLLM is installed here")
    result = run("serve", str(smollm2), "--run")
    assert "vLLM is not installed" in result.stderr


def test_engines_that_do_not_exist_are_said_so() -> None:
    result = run("ask", "Why?", "--engine", "vlm", "--docs", __file__)
    assert "there is no engine 'vlm'" in result.stderr
    result = run("warm", __file__, "--engine", "http://127.0.0.1:9", "--store", "memory://")
    assert "the server at http://127.0.0.1:9 keeps the KV" in result.stderr
