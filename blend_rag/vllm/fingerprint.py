"""A digest of the weights vLLM serves, the same for every number of ranks where the checkpoint's files are at hand."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger

from blend_rag.folders import cache_folder
from blend_rag.vllm.decoder import VLLMDecoder

logger = init_logger(f"vllm.{__name__}")  # below vLLM's own, so that it is shown

_PATTERNS = ("*.safetensors", "*.gguf")
_BLOCK = 1 << 22
_SAMPLED = 512


def served_fingerprint(vllm_config: Any, model: torch.nn.Module, decoder: VLLMDecoder) -> str:
    """sha256, hex, over the model's configuration and every byte of its weights.

    Where vLLM did not load the weights from files in a folder (dummy weights, streamed ones), the weights in memory are
    hashed on every rank instead, and such KV is shared by servers with as many ranks only.
    """
    model_config = vllm_config.model_config
    settings = {name: str(getattr(model_config, name, None)) for name in ("dtype", "quantization")}
    settings["config"] = _config_text(model_config.hf_config)
    head = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    load_format = str(getattr(vllm_config.load_config.load_format, "value", vllm_config.load_config.load_format))
    files = _weight_files(model_config) if load_format in ("auto", "hf", "safetensors", "gguf") else []
    if files:
        with ThreadPoolExecutor(8) as pool:
            for name, digest in zip((path.name for path in files), pool.map(_file_digest, files), strict=True):
                head.update(f"{name} {digest}".encode())
    else:
        head.update(_weights_digest(model, decoder))
    return head.hexdigest()


def _config_text(hf_config: Any) -> str:
    data = hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        data.pop(name, None)
    return json.dumps(data, sort_keys=True, default=str)


def _weight_files(model_config: Any) -> list[Path]:
    folder = Path(model_config.model)
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            folder = Path(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))
        except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError):
            return []
    return sorted(path for pattern in _PATTERNS for path in folder.glob(pattern))


def _file_digest(path: Path) -> str:
    """sha256 of a file, remembered by its size and times, so that a restart does not read it again."""
    status = path.stat()
    identity = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
    note = cache_folder() / "digests" / hashlib.sha256(identity.encode()).hexdigest()
    try:
        return note.read_text().split()[0]
    except (OSError, IndexError):
        pass
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
    digest = hasher.hexdigest()
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary = note.with_suffix(f".{torch.randint(1 << 62, ()).item()}")
        temporary.write_text(f"{digest} {identity}\n")
        temporary.replace(note)
    except OSError as error:
        logger.warning("the digest of %s is not remembered (%s)", path.name, error)
    return digest


def _weights_digest(model: torch.nn.Module, decoder: VLLMDecoder) -> bytes:
    hasher = hashlib.sha256(f"{decoder.ranks}".encode())
    with ThreadPoolExecutor(8) as pool:
        for digest in pool.map(_tensor_digest, sorted(model.state_dict().items())):
            hasher.update(digest)
    return b"".join(decoder.from_all_ranks(hasher.digest()))


def sample_weights(model: torch.nn.Module, decoder: VLLMDecoder) -> bytes:
    """sha256 of some numbers of every weight in memory: tells new weights from old ones in milliseconds."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        flat = tensor.detach().reshape(-1)
        numbers = flat[:: max(1, len(flat) // _SAMPLED)].contiguous().view(torch.uint8).cpu().numpy()
        hasher.update(name.encode())
        hasher.update(numbers.data)
    return b"".join(decoder.from_all_ranks(hasher.digest()))


def _tensor_digest(item: tuple[str, torch.Tensor]) -> bytes:
    name, tensor = item
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    hasher = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    hasher.update(data.data)
    return hasher.digest()
