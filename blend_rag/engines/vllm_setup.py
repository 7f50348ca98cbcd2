"""What vLLM has to be started with so that it blends on this machine: connector, memory, command line.

Knows names of vLLM's options; does not import it.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from blend_rag.blend.policy import RecomputePolicy
from blend_rag.engines.wire import policy_parameters

TESTED_VLLM = ("0.24.0", "0.26.0", "0.32.0")
"""Releases that the connector's tests or benchmarks ran on."""

CONNECTOR = {
    "kv_connector": "BlendConnector",
    "kv_connector_module_path": "blend_rag.vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is: bytes of each GPU (0 without one) and of host memory."""

    gpu_bytes: int
    host_bytes: int

    @classmethod
    def here(cls) -> Machine:
        """This one."""
        import torch

        gpu = int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(gpu, host)


@dataclass(frozen=True, slots=True)
class Memory:
    """How a machine's memory is shared out.

    Attributes:
        gpu_bytes: the connector's tier on each GPU, beside vLLM's memory.
        host_bytes: the connector's tier in each worker's host memory.
        gpu_memory_utilization: what vLLM may take of a GPU.
        cpu_kv_gib: what vLLM may take for pages on a CPU.
    """

    gpu_bytes: int
    host_bytes: int
    gpu_memory_utilization: float
    cpu_kv_gib: int

    @classmethod
    def of(cls, machine: Machine, ranks: int = 1) -> Memory:
        """A twelfth of a GPU and a quarter of host memory, shared by the ranks, for chunk KV.

        A blend holds a prompt's KV while it runs, so some of a GPU stays free beside both.
        """
        gpu = machine.gpu_bytes // 12 // _GIB * _GIB
        host = max(1, machine.host_bytes // 4 // ranks // _GIB) * _GIB
        share = 0.9 - (gpu + 4 * _GIB) / machine.gpu_bytes if machine.gpu_bytes else 0.9
        return cls(gpu, host, round(max(share, 0.5), 2), max(1, machine.host_bytes // 8 // _GIB))


def connector_config(
    *,
    policy: RecomputePolicy | None = None,
    store: str | Sequence[str] | None = None,
    allow_unsigned: bool = False,
    namespace: str = "",
    store_dtype: str = "auto",
    gpu_bytes: int = 0,
    host_bytes: int | None = None,
    separator: str | None = None,
) -> dict[str, Any]:
    """VLLM's `kv_transfer_config`; arguments are the connector's settings, those at their defaults are left out."""
    given: dict[str, Any] = {
        "store": [store] if isinstance(store, str) else list(store or ()),
        "allow_unsigned": allow_unsigned,
        "namespace": namespace,
        "store_dtype": "" if store_dtype == "auto" else store_dtype,
        "gpu_bytes": gpu_bytes,
        "host_bytes": host_bytes,
        "separator": separator,
    }
    settings = {name: value for name, value in given.items() if value}
    if policy is not None and policy != RecomputePolicy():
        default = policy_parameters(RecomputePolicy())
        settings |= {name: value for name, value in policy_parameters(policy).items() if value != default[name]}
    return {**CONNECTOR, "kv_connector_extra_config": settings}


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A command line and what its environment needs besides."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        """For a shell, an option on each line."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words += [shlex.quote(word) for word in self.arguments]
        lines = [""]
        for word in words:
            if word.startswith("--"):
                lines.append(f"  {word}")
            else:
                lines[-1] += f" {word}" if lines[-1] else word
        return " \\\n".join(lines)


def server_command(
    model: str,
    config: Mapping[str, Any],
    machine: Machine,
    memory: Memory,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model: str | None = None,
    extra: Sequence[str] = (),
) -> ServerCommand:
    """The command that serves a model with the connector on a machine like this one.

    Args:
        model: folder or hub id.
        config: of `connector_config`.
        machine, memory: decide between GPU and CPU, and how memory is shared out.
        host, port: where to listen.
        served_model: the name clients use.
        extra: further arguments of vLLM, which go before ours where both say something.
    """
    given = {word.split("=")[0] for word in extra if word.startswith("--")}
    options = {"--host": host, "--port": str(port)}
    if served_model:
        options["--served-model-name"] = served_model
    if machine.gpu_bytes:
        options["--gpu-memory-utilization"] = str(memory.gpu_memory_utilization)
    else:
        options["--dtype"] = "float32"  # several times faster than bfloat16 on most CPUs
    options["--kv-transfer-config"] = json.dumps(config, separators=(",", ":"))
    arguments = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    for name, value in options.items():
        if name not in given:
            arguments += [name, value]
    environment = {} if machine.gpu_bytes else {"VLLM_CPU_KVCACHE_SPACE": str(memory.cpu_kv_gib)}
    return ServerCommand((*arguments, *extra), environment)


def installed_vllm() -> str | None:
    """Version of the vLLM in this environment, without a build's suffix; None where there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    return None
