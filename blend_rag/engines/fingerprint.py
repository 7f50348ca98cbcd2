"""A digest of everything that decides a model's KV, the same on every machine."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_SETTINGS = (
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
)


def model_fingerprint(model: Any) -> str:
    """sha256, hex, over weights, RoPE and norm settings, quantisation and active adapters of a transformers model.

    Every weight is hashed (about half a second a gigabyte and core), so a fine-tuned copy never passes for its base.
    The folder's name, the output head's tying and the machine do not count.
    """
    head = hashlib.sha256(json.dumps(_settings(model), sort_keys=True, default=str).encode())
    tensors = sorted(model.get_decoder().state_dict().items())
    with ThreadPoolExecutor() as pool:  # hashlib releases the GIL
        digests = pool.map(lambda item: _tensor_digest(*item), tensors)
        for digest in digests:
            head.update(digest)
    return head.hexdigest()


def _settings(model: Any) -> dict[str, Any]:
    config = model.config
    found = {name: getattr(config, name, None) for name in _SETTINGS}
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is not None:
        found["quantization"] = quantisation.to_dict() if hasattr(quantisation, "to_dict") else quantisation
    if getattr(model, "_hf_peft_config_loaded", False):
        found["adapters"] = [model.active_adapters(), {k: v.to_dict() for k, v in model.peft_config.items()}]
    return found


def _tensor_digest(name: str, tensor: torch.Tensor) -> bytes:
    data = tensor.detach().cpu().contiguous()
    hasher = hashlib.sha256(f"{name} {data.dtype} {tuple(data.shape)}".encode())
    hasher.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.digest()
