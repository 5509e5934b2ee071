"""Speed of kernels, compared with a copy of as many bytes on the same device."""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gradsieve.doctor.group import Group
from gradsieve.ops import BINS

ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}  # larger than any cache
DENSITY = 0.001
LEAST, MOST = 3, 30  # repeats


@dataclass(frozen=True)
class Speed:
    """One kernel: bytes read and written, and the median of its seconds."""

    kernel: str
    bytes: int
    seconds: float
    copy_seconds: float

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "of_copy": self.copy_seconds / self.seconds}


def speeds(group: Group, budget_s: float) -> list[dict[str, Any]]:
    """Measure all kernels, each alternating with its copy, within a budget of seconds."""
    cases = _cases(group)
    return [_measure(group, name, size, run, budget_s / len(cases)).row() for name, (size, run) in cases.items()]


def _cases(group: Group) -> dict[str, tuple[int, Callable[[], object]]]:
    op, device = torch.ops.gradsieve, group.device
    n = ELEMENTS[device.type]
    x = torch.randn(n, device=device)
    residual, grad, out = torch.zeros_like(x), x.clone(), torch.zeros_like(x)
    threshold = float(x[: 1 << 20].abs().quantile(1 - DENSITY))
    picked = op.select_above(x, threshold, 0, n)
    k, values = len(picked), x[picked]
    counts, finite = torch.zeros(BINS, dtype=torch.int64, device=device), torch.tensor(True, device=device)
    halves, packed = [x[: n // 2].clone(), x[n // 2 :].clone()], op.pack_sorted(picked, 0, n)
    return {
        "accumulate_select_": (
            16 * n,
            lambda: op.accumulate_select_(residual, grad, threshold, 0, n // 8, backup=grad, finite=finite),
        ),
        "select_above": (4 * n, lambda: op.select_above(x, threshold, 0, n)),
        "log_histogram": (4 * n, lambda: op.log_histogram(x, 0, n)),
        "all_finite": (4 * n, lambda: op.all_finite(x)),
        "drift_select": (
            8 * n,
            lambda: op.drift_select(out, halves, threshold, 0, n, second=[], counts=counts),
        ),
        "scatter_update_": (4 * n + 16 * k, lambda: op.scatter_update_(out, picked, values)),
        "gather_clear_": (16 * k, lambda: op.gather_clear_(residual, picked)),
        "gather_pieces": (16 * k, lambda: op.gather_pieces(halves, picked)),
        "pack_sorted": (8 * k, lambda: op.pack_sorted(picked, 0, n)),
        "unpack_sorted": (8 * k, lambda: op.unpack_sorted(packed, k, 0, n)),
    }


def _measure(group: Group, name: str, size: int, run: Callable[[], object], budget_s: float) -> Speed:
    """A copy that moves `size` bytes reads half of them and writes half."""
    source = torch.zeros(size // 2, dtype=torch.uint8, device=group.device)
    target = torch.zeros_like(source)
    times: dict[str, list[float]] = {"kernel": [], "copy": []}
    cases: dict[str, Callable[[], object]] = {"kernel": run, "copy": lambda: target.copy_(source)}
    for call in cases.values():
        call()  # the first call compiles
    end = group.seconds() + budget_s
    while len(times["copy"]) < LEAST or (len(times["copy"]) < MOST and group.seconds() < end):
        for which, call in cases.items():
            before = group.seconds()
            call()
            times[which].append(group.seconds() - before)
    return Speed(name, size, statistics.median(times["kernel"]), statistics.median(times["copy"]))
