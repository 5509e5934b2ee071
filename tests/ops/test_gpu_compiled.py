"""The machine code of the kernels for GPUs, compiled here without one: what it reads at a time, what it needs.

Speed on a GPU is not tested: there is none here. This is what can be read off the code.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from gradsieve.ops.schema import SCHEMAS
from helpers import ROOT

TARGETS = ("cuda:80", "cuda:90", "hip:gfx942")  # A100, H100, MI300
TILE = 4_096  # elements that a program of a streaming kernel reads of each input
VECTOR = 16  # bytes of the widest load that a thread can make

# Sixteen warps fit into one processor at the same time, so that some compute while others wait for memory: NVIDIA's
# have 65,536 registers, 128 for each of 512 threads; those of gfx942 have 512 per lane of 4 SIMD units.
MOST_REGISTERS = 128
# Two programs fit into the 64 KiB that a processor of gfx942 has, four and more into those of sm_80 (164 KiB).
MOST_SHARED_BYTES = 32 << 10

# Kernels that read whole vectors: bytes read and written per element, with weights or gradients of this size.
Sizes = Callable[[int], int]
READ: dict[str, Sizes] = {
    "_select": lambda size: size,
    "_accumulate": lambda size: 4 + size,
    "_histogram": lambda size: 4,
    "_look": lambda size: max(size, 4) + size,
    "_all_finite": lambda size: size,
}
WRITTEN: dict[str, Sizes] = {"_accumulate": lambda size: 4 + max(size, 4)}
ITEM = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}


def compiled(target: str, *names: str) -> list[dict[str, Any]]:
    """One row for each kernel. Triton's cache, whose keys hold the source, the target and all options, is used."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'gradsieve[gpu-tests]'")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "ops" / "gpu_compiled.py"), target, *names],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=1_200,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(rows: list[dict[str, Any]]) -> None:
    assert {row["op"] for row in rows} == set(SCHEMAS)
    assert {row["kernel"] for row in rows} >= READ.keys()
    for row in rows:
        assert row["spilled"] == 0, row
        assert row["registers"] <= MOST_REGISTERS, row
        assert row["shared_bytes"] <= MOST_SHARED_BYTES, row
        at_once, size = row["threads"] * VECTOR, ITEM[row["dtype"]]
        if row["kernel"] in READ:  # all of a full tile comes in loads of 128 bits
            assert row["wide_loads"] * at_once >= TILE * READ[row["kernel"]](size), row
        if row["kernel"] in WRITTEN:
            assert row["wide_stores"] * at_once >= TILE * WRITTEN[row["kernel"]](size), row


@pytest.mark.parametrize("target", TARGETS)
def test_machine_code(target: str) -> None:
    rows = compiled(target, "float32", "unaligned")
    check([row for row in rows if row["aligned"]])
    # The figures can fail: a vector that does not begin at a multiple of 16 bytes has no wide loads.
    odd = {row["kernel"]: row["wide_loads"] for row in rows if not row["aligned"]}
    assert odd["_select"] == odd["_look"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("target", TARGETS)
def test_machine_code_for_other_types(target: str, dtype: str) -> None:
    check(compiled(target, dtype))
