"""Registers the GPU kernels. Without Triton there are none, and the plain ones are used.

torch calls both CUDA and ROCm by the key CUDA. Triton is imported by the first call, not before.
GRADSIEVE_TRITON=0 in the environment leaves GPUs to the plain kernels.
"""

import functools
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from gradsieve.ops.on_cpu import module
from gradsieve.ops.schema import LIBRARY, SCHEMAS

ELSEWHERE = {  # than in gpu
    "accumulate_select_": "gpu_select",
    "drift_select": "gpu_drift",
    "gather_pieces": "gpu_pieces",
    "log_histogram": "gpu_histogram",
    "pack_sorted": "gpu_pack",
    "scatter_pieces_": "gpu_pieces",
    "select_above": "gpu_select",
    "unpack_sorted": "gpu_pack",
}


def available() -> bool:
    """Whether GPUs have kernels of their own."""
    return find_spec("triton") is not None and os.environ.get("GRADSIEVE_TRITON", "1") != "0"


def kernel(op: str) -> Callable[..., Any]:
    """The function for an op; it is called with tensors of any device that Triton can use."""
    function: Callable[..., Any] = getattr(module(ELSEWHERE.get(op, "gpu")), op)
    return function


def _launcher(op: str) -> Callable[..., Any]:
    found = functools.cache(kernel)

    def launch(*arguments: Any, **keywords: Any) -> Any:
        with torch.cuda.device(_device(arguments)):  # Triton launches on the current one
            return found(op)(*arguments, **keywords)

    return launch


def _device(arguments: tuple[Any, ...]) -> torch.device:
    first = arguments[0]
    tensor: Tensor = first if isinstance(first, Tensor) else (*first, arguments[1])[0]
    return tensor.device


if available():
    for _op in SCHEMAS:
        LIBRARY.impl(_op, _launcher(_op), "CUDA")
