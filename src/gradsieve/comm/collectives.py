"""Collectives as values: a worker's program yields one and receives the reply.

A program is a generator, straight-line code for one worker. The world that runs it, a process group or a virtual
one, answers what it yields, so no algorithm asks whether it is distributed. Programs call the typed helpers
(`total = yield from all_reduce("values", x)`); worlds receive the values that these yield.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class AllReduce:
    """The sum over all workers of tensors of one shape. The tensor itself may be overwritten with the reply."""

    tag: str
    tensor: Tensor


@dataclass(frozen=True)
class AllGather:
    """The tensors of all workers, in rank order; they may differ in their first dimension.

    `lengths`, if all workers know them already, saves the round in which they are exchanged.
    """

    tag: str
    tensor: Tensor
    lengths: Sequence[int] | None = None


@dataclass(frozen=True)
class Broadcast:
    """The tensor of worker `root`. The others pass one of the same shape, which may be overwritten."""

    tag: str
    tensor: Tensor
    root: int


@dataclass(frozen=True)
class AllToAll:
    """Rows for each worker: the first `splits[0]` of the tensor for worker 0, and so on. The reply: rows from each.

    Empty messages are not sent, so this is also a pairwise exchange. `lengths`, if this worker knows how many rows
    come from each, saves the round in which they are exchanged; either all workers know them or none. `rank` is
    this worker's own: what it sends to itself does not travel.
    """

    tag: str
    tensor: Tensor
    splits: Sequence[int]
    rank: int
    lengths: Sequence[int] | None = None


Collective: TypeAlias = AllReduce | AllGather | Broadcast | AllToAll
Program: TypeAlias = Generator[Collective, Any, T]


def all_reduce(tag: str, tensor: Tensor) -> Program[Tensor]:
    """The sum over all workers; `tensor` may be overwritten."""
    total: Tensor = yield AllReduce(tag, tensor)
    return total


def all_gather(tag: str, tensor: Tensor, lengths: Sequence[int] | None = None) -> Program[list[Tensor]]:
    """The tensors of all workers, in rank order."""
    parts: list[Tensor] = yield AllGather(tag, tensor, lengths)
    return parts


def broadcast(tag: str, tensor: Tensor, root: int) -> Program[Tensor]:
    """The tensor of worker `root`."""
    sent: Tensor = yield Broadcast(tag, tensor, root)
    return sent


def all_to_all(
    tag: str, tensor: Tensor, splits: Sequence[int], rank: int, lengths: Sequence[int] | None = None
) -> Program[list[Tensor]]:
    """The rows that each worker has for this one, in rank order."""
    parts: list[Tensor] = yield AllToAll(tag, tensor, splits, rank, lengths)
    return parts


def immediately(result: T) -> Program[T]:
    """A program that needs no collective."""
    yield from ()
    return result


def pad(tensor: Tensor, length: int) -> Tensor:
    """`tensor`, followed by zeros up to `length` rows."""
    missing = length - len(tensor)
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor
