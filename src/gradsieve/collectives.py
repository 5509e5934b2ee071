"""Collectives as values: a worker's program yields one and receives the reply.

A program is a generator, straight-line code for one worker. Whoever runs it, a process group or a virtual world,
answers what it yields, so no algorithm ever asks whether it is distributed.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from gradsieve.wire import decode, encode, message_bytes

T = TypeVar("T")

LENGTH_BYTES = 8  # what a rank sends to announce the length of a ragged message


@dataclass(frozen=True)
class AllReduce:
    """The sum over all workers of tensors of one shape. The tensor itself may be overwritten with the reply."""

    tag: str
    tensor: Tensor


@dataclass(frozen=True)
class RoundedSum:
    """As `AllReduce`, but travelling as `wire`, a narrower type. The reply is `(total, error)`.

    A worker's error is what its rounding left out, so that all errors and the total make up exactly what was handed
    in: each worker rounds what it sends, and the sum of its own slice once more (see `round_slice`).
    """

    tag: str
    tensor: Tensor
    wire: torch.dtype


@dataclass(frozen=True)
class AllGather:
    """The tensors of all workers, in rank order; they may differ in their first dimension.

    `lengths`, where all workers know them already, spares the round in which they are told.
    """

    tag: str
    tensor: Tensor
    lengths: Sequence[int] | None = None


@dataclass(frozen=True)
class Broadcast:
    """The tensor of worker `root`. The others hand in one of the same shape, which may be overwritten."""

    tag: str
    tensor: Tensor
    root: int


@dataclass(frozen=True)
class AllToAll:
    """Rows for each worker: the first `splits[0]` of the tensor for worker 0, and so on. The reply: rows from each.

    A worker that has nothing for another sends it nothing, so a pairwise exchange is one of these, too. `lengths`,
    where this worker knows how many rows come from each, spares the round in which they are told; all know or
    none does. `rank` is this worker's own: what it hands to itself does not travel.
    """

    tag: str
    tensor: Tensor
    splits: Sequence[int]
    rank: int
    lengths: Sequence[int] | None = None


Collective: TypeAlias = AllReduce | RoundedSum | AllGather | Broadcast | AllToAll
Program: TypeAlias = Generator[Collective, Any, T]


def pad(tensor: Tensor, length: int) -> Tensor:
    """`tensor`, followed by zeros up to `length` rows."""
    missing = length - len(tensor)
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


@dataclass
class Traffic:
    """What went through collectives of one tag."""

    calls: int = 0
    handed_bytes: int = 0  # what this worker handed to the collectives, padding included
    # What a worker puts on the wire: no less than rings would. The mean over workers, but of all-to-alls its own,
    # as it does not know what others send each other.
    ring_bytes: float = 0.0
    seconds: float = 0.0

    def __iadd__(self, other: "Traffic") -> "Traffic":
        self.calls += other.calls
        self.handed_bytes += other.handed_bytes
        self.ring_bytes += other.ring_bytes
        self.seconds += other.seconds
        return self


@dataclass
class Ledger:
    """One worker's traffic, by tag."""

    by_tag: dict[str, Traffic] = field(default_factory=dict)

    def add(self, tag: str, traffic: Traffic) -> None:
        self.by_tag.setdefault(tag, Traffic())
        self.by_tag[tag] += traffic

    @property
    def total(self) -> Traffic:
        total = Traffic()
        for traffic in self.by_tag.values():
            total += traffic
        return total


def traffic_of(call: Collective, reply: Any, world_size: int) -> Traffic:
    """The bytes behind one answered collective. Where lengths are unknown, it is two calls: lengths, rows."""
    others = world_size - 1
    size = call.tensor.nbytes
    if isinstance(call, AllReduce | RoundedSum):
        wire = call.tensor.dtype if isinstance(call, AllReduce) else call.wire
        padded = world_size * message_bytes(-(-call.tensor.numel() // world_size), wire)
        return Traffic(1, padded, ring_all_reduce_bytes(padded, world_size))
    if isinstance(call, Broadcast):
        return Traffic(1, size, others / world_size * size)
    if isinstance(call, AllToAll):
        travels = size - reply[call.rank].nbytes
        if call.lengths is not None:
            return Traffic(1, size, travels)
        return Traffic(2, LENGTH_BYTES * world_size + size, LENGTH_BYTES * others + travels)
    gathered = sum(rows.nbytes for rows in reply)
    if call.lengths is not None:
        return Traffic(1, size, others * gathered / world_size)
    return Traffic(2, LENGTH_BYTES + size, others * (LENGTH_BYTES + gathered / world_size))


def slices(tensor: Tensor, world_size: int) -> Tensor:
    """A vector as rows of one length, one a worker, the last ones padded with zeros."""
    length = -(-len(tensor) // world_size)
    return pad(tensor, length * world_size).view(world_size, length)


def round_slice(parts: Sequence[Tensor], own: Tensor, rank: int, wire: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sum of one slice as its owner sends it: of others' parts as they came, its own unrounded; and the error.

    Parts are added in rank order, so that the sum does not depend on who was faster.
    """
    total = torch.zeros_like(own)
    for sender, part in enumerate(parts):
        total += own if sender == rank else part
    message = encode(total, wire)
    return message, total - decode(message, wire)


def ring_all_reduce_bytes(size: int, world_size: int) -> float:
    """What a worker puts on the wire in a ring all-reduce of `size` bytes."""
    return 2 * (world_size - 1) / world_size * size


def watched(program: Program[T], ledger: Ledger, world_size: int) -> Program[T]:
    """`program` as it is, with every collective that it yields entered in `ledger`."""
    reply = None
    try:
        while True:
            try:
                call = program.send(reply)
            except StopIteration as stop:
                result: T = stop.value
                return result
            started = time.perf_counter()
            reply = yield call
            traffic = traffic_of(call, reply, world_size)
            traffic.seconds = time.perf_counter() - started
            ledger.add(call.tag, traffic)
    finally:
        program.close()
