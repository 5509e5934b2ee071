"""The network between workers: latency of a small message, and bandwidth."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gradsieve.doctor.group import Group

SMALL, LARGE = 8, 1 << 24  # bytes
FIRST = 1 << 20  # bytes of a trial that decides how large a message fits into the time
LEAST, MOST = 3, 50  # repeats


def link(group: Group, budget_s: float) -> dict[str, Any]:
    """Measure all-reduces, and messages from each worker to the next; None for a single worker."""
    if group.size == 1:
        return {}
    share = budget_s / 4
    size = group.agreed(_bearable(group, share))
    small, large = torch.zeros(SMALL // 4, device=group.device), torch.zeros(size // 4, device=group.device)
    reduce_small = _median(group, lambda: dist.all_reduce(small), share)
    reduce_large = _median(group, lambda: dist.all_reduce(large), share)
    next_small = _median(group, lambda: _to_next(group, small), share)
    next_large = _median(group, lambda: _to_next(group, large), share)
    per_worker = group.gather((next_small, size / next_large))
    latencies, bandwidths = zip(*per_worker, strict=True)
    return {
        "message_bytes": size,
        "all_reduce_latency_s": reduce_small,
        "all_reduce_bytes_per_s": 2 * (group.size - 1) / group.size * size / reduce_large,
        "to_next_latency_s": list(latencies),
        "to_next_bytes_per_s": list(bandwidths),
    }


def _bearable(group: Group, budget_s: float) -> int:
    """Bytes of a message that can be sent a few times within the budget, at most `LARGE`."""
    trial = torch.zeros(FIRST // 4, device=group.device)
    took = _median(group, lambda: _to_next(group, trial), 0)
    size = int(FIRST * budget_s / (LEAST + 1) / 2 / took)
    return max(min(size, LARGE), FIRST // 16) // 8 * 8


def _to_next(group: Group, message: torch.Tensor) -> None:
    """Every worker sends to the next one and receives from the one before, at the same time."""
    received, rank, size = torch.empty_like(message), group.rank, group.size
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, message, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
    )
    for work in works:
        work.wait()


def _median(group: Group, call: Callable[[], object], budget_s: float) -> float:
    """Seconds of a collective; all workers make the same number of them."""
    call()
    before = group.seconds()
    call()
    repeats = group.agreed(max(LEAST, min(MOST, int(budget_s / max(group.seconds() - before, 1e-6)))))
    times = []
    for _ in range(repeats):
        before = group.seconds()
        call()
        times.append(group.seconds() - before)
    return statistics.median(times)
