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

T = TypeVar("T")

LENGTH_BYTES = 8  # what a rank sends to announce the length of a ragged message


@dataclass(frozen=True)
class AllReduce:
    """The sum over all workers of tensors of one shape. The tensor itself may be overwritten with the reply."""

    tag: str
    tensor: Tensor


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


Collective: TypeAlias = AllReduce | AllGather | Broadcast
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
    ring_bytes: float = 0.0  # what a worker would put on the wire if each were a ring, the mean over workers
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
    """The bytes behind one answered collective. An all-gather of unknown lengths is two calls: lengths, rows."""
    others = world_size - 1
    size = call.tensor.nbytes
    if isinstance(call, AllReduce):
        return Traffic(1, size, ring_all_reduce_bytes(size, world_size))
    if isinstance(call, Broadcast):
        return Traffic(1, size, others / world_size * size)
    padded = max(rows.nbytes for rows in reply)
    if call.lengths is not None:
        return Traffic(1, padded, others * padded)
    return Traffic(2, LENGTH_BYTES + padded, others * (LENGTH_BYTES + padded))


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
