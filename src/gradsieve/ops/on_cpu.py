"""Registers the CPU kernels. The module of a kernel, and Numba with it, is imported by the first call."""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from gradsieve.ops.schema import LIBRARY, SCHEMAS

ELSEWHERE = {  # than in cpu
    "drift_select": "cpu_drift",
    "gather_pieces": "cpu_pieces",
    "pack_sorted": "cpu_pack",
    "scatter_pieces_": "cpu_pieces",
    "unpack_sorted": "cpu_pack",
}
MODULES = {"cpu", *ELSEWHERE.values()}


def module(name: str) -> Any:
    return import_module(f"gradsieve.ops.{name}")


def _kernel(op: str) -> Callable[..., Any]:
    @functools.cache
    def found() -> Callable[..., Any]:
        kernel: Callable[..., Any] = getattr(module(ELSEWHERE.get(op, "cpu")), op)
        return kernel

    return lambda *arguments, **keywords: found()(*arguments, **keywords)


def warm_up() -> None:
    """Call every kernel once: Numba compiles it on a machine's first call, and loads it on a process's first."""
    for name in sorted(MODULES):
        module(name).warm_up()


for _op in SCHEMAS:
    LIBRARY.impl(_op, _kernel(_op), "CPU")
