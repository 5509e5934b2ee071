"""The worker's environment: versions, device, backend, and which kernels torch's dispatcher chooses."""

import os
import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradsieve._version import __version__
from gradsieve.doctor.group import Group
from gradsieve.ops import on_gpu
from gradsieve.ops.schema import SCHEMAS


def machine(group: Group) -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "gradsieve": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "numba": _version("numba"),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "nccl": _nccl(),
        "backend": group.backend,
        "device": str(group.device),
        "device_name": _name(group.device),
        "kernels": _kernels(group.device),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _nccl() -> str | None:
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"{found.name}, {found.multi_processor_count} processors, {found.total_memory >> 30} GiB"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or 'CPU'}, {os.cpu_count()} cores"


def _kernels(device: torch.device) -> str:
    """By the registrations in the dispatcher, not by what is installed."""
    key = {"cpu": "CPU", "cuda": "CUDA"}[device.type]
    own = [op for op in SCHEMAS if torch._C._dispatch_has_kernel_for_dispatch_key(f"gradsieve::{op}", key)]
    if len(own) < len(SCHEMAS):
        reason = "GRADSIEVE_TRITON=0" if not on_gpu.available() and _version("triton") else "no Triton"
        return f"plain torch ({reason})"
    return {"cpu": "Numba", "cuda": "Triton"}[device.type]
