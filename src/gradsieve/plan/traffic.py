"""The collectives of one step of each method, with tensors that have a size but no content.

Bytes are counted by `gradsieve.comm.traffic`, the meter of real runs; a test compares the two.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.comm.collectives import AllGather, AllReduce, AllToAll, Collective
from gradsieve.comm.traffic import Traffic, traffic_of
from gradsieve.comm.wire import VALUES, message_length
from gradsieve.density.base import elements
from gradsieve.plan.links import Link
from gradsieve.sparsifiers.exdyna.threshold import BINS
from gradsieve.sparsifiers.histograms import narrowest

SMALL = 1 << 22  # bytes up to which worlds sum in two rounds, one slice per worker; the backend sums larger vectors
_HEAD_BYTES = 2  # of a histogram: its first bin


def sparse_step(
    n: int, density: float, workers: int, *, overlap: float | None = None, values: str = "fp32"
) -> list[Collective]:
    """The collectives of a step with one threshold for all workers: histogram, positions, values.

    overlap: average number of workers that pick the same position, if each may pick any (shared_threshold); None if
    each has its own part of the vector (exdyna).
    """
    k = elements(density, n)
    if k >= n:
        return [AllReduce("values", _of(n, torch.float32))]
    row = _HEAD_BYTES + BINS * narrowest(k).itemsize
    span = -(-n // workers) if overlap is None else n
    picks = ops.packed_bytes(math.ceil(k * min(overlap or 1.0, workers) / workers), span)
    return [
        AllGather("histogram", _of(row, torch.uint8), [row] * workers),
        AllGather("indices", _of(picks, torch.uint8), [picks] * workers),
        *_summed(k + 1, workers, values),
    ]


def _summed(count: int, workers: int, values: str) -> Sequence[Collective]:
    """The collectives that sum values, in float32 or rounded: see `comm/rounded.py`."""
    wire = VALUES[values]
    if wire is torch.float32:
        return [AllReduce("values", _of(count, wire))]
    kind = torch.uint8 if wire.itemsize == 1 else wire
    row = message_length(-(-count // workers), wire)
    slices = _of(row * workers, kind).view(workers, row)
    ones = [1] * workers
    return [AllToAll("values", slices, ones, 0, ones), AllGather("values", _of(row, kind), [row] * workers)]


def measured(call: Collective, workers: int) -> Traffic:
    """The traffic that the meter would count."""
    replies: Any = None
    if isinstance(call, AllGather):
        replies = [call.tensor] * workers
    elif isinstance(call, AllToAll):
        replies = [call.tensor[:1]] * workers
    return traffic_of(call, replies, workers)


def total(calls: Sequence[Collective], workers: int) -> Traffic:
    """The traffic of a whole step."""
    found = Traffic()
    for call in calls:
        found += measured(call, workers)
    return found


def seconds(call: Collective, workers: int, link: Link) -> float:
    """Seconds that a world takes for a collective."""
    sent = measured(call, workers).ring_bytes
    if not isinstance(call, AllReduce):
        return link.exchange(sent, workers)
    if call.tensor.nbytes > SMALL:
        return link.all_reduce([call.tensor.nbytes], workers)
    return link.exchange(sent, workers, rounds=2)


def _of(count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype, device="meta")
