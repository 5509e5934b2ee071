"""The peak memory of a step, measured in a separate process: a process's peak never goes down."""

import subprocess
import sys
from pathlib import Path

import torch

from gradsieve._check import BadInput
from gradsieve.reducer import SparseReducer
from gradsieve.sparsifiers import make_sparsifier
from gradsieve.worlds.virtual import VirtualWorld


def peak_extra_fraction(n: int, density: float) -> float:
    """Peak memory of an ExDyna step beyond residual and gradient, as a fraction of n floats."""
    done = subprocess.run(
        [sys.executable, "-m", "gradsieve_lab.bench.memory", str(n), repr(density)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout)


def _measure(n: int, density: float) -> float:
    _steps(70_000, density)  # compiles
    peak_before, resident = process_status("VmHWM"), process_status("VmRSS")
    _steps(n, density)
    peak, residual_and_gradient = process_status("VmHWM"), 2 * 4 * n
    if peak == peak_before:
        raise BadInput(f"n must be large enough to be seen beside the program itself, got {n}")
    return (peak - resident - residual_and_gradient) / (4 * n)


def _steps(n: int, density: float) -> None:
    reducer = SparseReducer(make_sparsifier("exdyna"), density, rank=0, world_size=1, measure=False)
    grad = torch.empty(n)
    for step in range(5):
        grad.normal_(generator=torch.Generator().manual_seed(step))
        VirtualWorld(1).run([reducer.reduce(grad, out=grad)])


def process_status(field: str) -> int:
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    sys.stdout.write(str(_measure(int(sys.argv[1]), float(sys.argv[2]))))
