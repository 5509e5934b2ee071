"""Compile what the launch code for GPUs launches, without a GPU; print what the machine code is like, as JSON.

    python tests/ops/gpu_compiled.py cuda:80 float32 bfloat16 unaligned

The ops are called with CPU tensors. Every launch is compiled for the target, with the types, the alignment and the
options it was launched with, and is not run: its integer outputs are filled with ones instead, as if every tile had
a hit, so that the launches that follow from it are made, too.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from gradsieve.ops import BINS, on_gpu

TARGETS = {"cuda:80": ("cuda", 80, 32), "cuda:90": ("cuda", 90, 32), "hip:gfx942": ("hip", "gfx942", 64)}
N = 1 << 16


@dataclass
class Compiled:
    """One kernel, compiled."""

    op: str
    kernel: str
    target: str
    dtype: str
    registers: int  # per thread
    spilled: int  # registers, or bytes of stack
    shared_bytes: int
    wide_loads: int  # instructions that read 128 bits per thread
    wide_stores: int
    threads: int  # per program


class Nowhere:
    """A driver for a device that is not there."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def samples(dtype: torch.dtype) -> dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Arguments of every op, as training has them: aligned and large."""
    x, whole = torch.zeros(N), torch.arange(N)
    narrow, wide = x.to(dtype), x.to(torch.promote_types(dtype, torch.float32))
    pieces, flag = [narrow[: N // 2].clone(), narrow[N // 2 :].clone()], torch.tensor(True)
    counts, second = torch.zeros(BINS, dtype=torch.int64), [torch.zeros(N // 2)] * 2
    backup = narrow if dtype.itemsize >= 4 else torch.zeros(N)
    return {
        "select_above": [((narrow, 1.0, 0, N), {})],
        "accumulate_select_": [((x, narrow, 1.0, 0, N), {"backup": backup, "finite": flag})],
        "log_histogram": [((x, 0, N), {})],
        "drift_select": [
            ((wide, pieces, 1.0, 0, N), {"second": []}),
            ((wide, pieces, 1.0, 0, N), {"second": second, "counts": counts}),
        ],
        "gather_pieces": [((pieces, whole), {})],
        "scatter_pieces_": [((pieces, whole, wide), {})],
        "all_finite": [((narrow,), {})],
        "gather_clear_": [((narrow, whole), {})],
        "scatter_update_": [((narrow, whole, wide), {})],
        "pack_sorted": [((whole, 0, N), {})],
        "unpack_sorted": [((torch.zeros(2 * N // 8, dtype=torch.uint8), N, 0, N), {})],
    }


def unaligned() -> dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Vectors that begin at an odd place: to see that the figures show it."""
    x = torch.zeros(N + 1)[1:]
    parts = [x[: N // 2], x[N // 2 :]]
    return {
        "select_above": [((x, 1.0, 0, N), {})],
        "drift_select": [((x, parts, 1.0, 0, N), {"second": []})],
    }


def compile_all(target: str, dtype: torch.dtype, aligned: bool = True) -> list[Compiled]:
    found: dict[str, Compiled] = {}
    wanted = samples(dtype) if aligned else unaligned()
    op = ""

    def compiled_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made = plain_run(self, *args, grid=grid, warmup=True, **options)
        found.setdefault(made.hash, described(op, target, dtype, made))
        for each in args:
            if isinstance(each, torch.Tensor) and each.dtype in (torch.int32, torch.int64):
                each.fill_(1)
        return made

    driver.set_active(Nowhere(GPUTarget(*TARGETS[target])))
    plain_run, JITFunction.run = JITFunction.run, compiled_only
    assert_async, torch._assert_async = torch._assert_async, lambda *_: None  # nothing was computed
    try:
        for op, calls in wanted.items():
            for arguments, keywords in calls:
                on_gpu.kernel(op)(*arguments, **keywords)
    finally:
        JITFunction.run, torch._assert_async = plain_run, assert_async
    return list(found.values())


def described(op: str, target: str, dtype: torch.dtype, made: Any) -> Compiled:
    registers, spilled = _nvidia(made.asm["cubin"]) if target.startswith("cuda") else _amd(made.asm["amdgcn"])
    name, text = str(dtype).removeprefix("torch."), made.asm["ptx" if target.startswith("cuda") else "amdgcn"]
    wide_loads = len(re.findall(r"ld\.global\S*\.(?:v4\.b32|v2\.b64)|(?:global|buffer)_load_dwordx4", text))
    wide_stores = len(re.findall(r"st\.global\S*\.(?:v4\.b32|v2\.b64)|(?:global|buffer)_store_dwordx4", text))
    meta = made.metadata
    threads = meta.num_warps * TARGETS[target][2]
    return Compiled(op, meta.name, target, name, registers, spilled, meta.shared, wide_loads, wide_stores, threads)


def _nvidia(cubin: bytes) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [str(tool), "--dump-resource-usage", str(path)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def _amd(text: str) -> tuple[int, int]:
    counts = {key: int(value) for key, value in re.findall(r"\.(\w+_count):\s+(\d+)", text)}
    scratch = re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)
    assert scratch is not None
    return counts["vgpr_count"], counts["vgpr_spill_count"] + counts["sgpr_spill_count"] + int(scratch[1])


if __name__ == "__main__":
    target, *names = sys.argv[1:]
    for name in names:
        aligned, dtype = name != "unaligned", getattr(torch, name, torch.float32)
        for each in compile_all(target, dtype, aligned):
            print(json.dumps(asdict(each) | {"aligned": aligned}))  # noqa: T201
