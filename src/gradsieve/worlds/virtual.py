"""N workers in one process: their programs run in lock-step, without threads, and always in the same order."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradsieve._check import BadInput, at_least
from gradsieve.comm.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, Program
from gradsieve.worlds.waiting import WorkersDiverged

T = TypeVar("T")


class VirtualWorld:
    """Answers the collectives of `size` programs.

    >>> import torch
    >>> def program(rank):
    ...     total = yield AllReduce("sum", torch.tensor([float(rank)]))
    ...     return total.item()
    >>> VirtualWorld(3).run([program(0), program(1), program(2)])
    [3.0, 3.0, 3.0]
    """

    def __init__(self, size: int) -> None:
        self.size = at_least("size", size, 1)

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Run one program per worker to its end; returns their results in rank order."""
        if len(programs) != self.size:
            raise BadInput(f"programs must be one for each of {self.size} workers, got {len(programs)}")
        try:
            return self._run(programs)
        finally:
            for program in programs:
                program.close()

    def _run(self, programs: Sequence[Program[T]]) -> list[T]:
        replies: Iterable[Any] = [None] * self.size
        step = 0
        while True:
            calls: dict[int, Collective] = {}
            results: dict[int, T] = {}
            for rank, (program, reply) in enumerate(zip(programs, replies, strict=True)):
                try:
                    calls[rank] = program.send(reply)
                except StopIteration as stop:
                    results[rank] = stop.value
            if len(results) == self.size:
                return [results[rank] for rank in range(self.size)]
            described = [_describe(calls[rank]) if rank in calls else "finished" for rank in range(self.size)]
            _check_same(described, step)
            replies = self._answer([calls[rank] for rank in range(self.size)])
            step += 1

    def _answer(self, calls: list[Collective]) -> Iterable[Any]:
        """A reply for each worker, which may change it. All-gathers make one when its worker is about to go on."""
        first = calls[0]
        tensors = [call.tensor for call in calls]
        if isinstance(first, AllReduce):
            total = tensors[0].clone()
            for tensor in tensors[1:]:
                total += tensor
            return [tensor.copy_(total) for tensor in tensors]
        if isinstance(first, Broadcast):
            sent = tensors[first.root].clone()
            return [tensor.copy_(sent) for tensor in tensors]
        if isinstance(first, AllToAll):
            return _all_to_all(calls)
        _check_lengths(calls)
        everything, lengths = torch.cat(tensors), [len(tensor) for tensor in tensors]
        return (list(everything.clone().split(lengths)) for _ in calls)


def _all_to_all(calls: list[Collective]) -> list[list[Tensor]]:
    parts = []
    for rank, call in enumerate(calls):
        assert isinstance(call, AllToAll)
        if call.rank != rank or len(call.splits) != len(calls) or sum(call.splits) != len(call.tensor):
            raise WorkersDiverged(
                f"worker {rank} handed {len(call.tensor)} rows to {call.tag!r} as worker {call.rank}, "
                f"split for {len(calls)} workers into {list(call.splits)}"
            )
        parts.append(call.tensor.split(list(call.splits)))
    replies = [[part[rank].clone() for part in parts] for rank in range(len(calls))]
    for rank, (call, reply) in enumerate(zip(calls, replies, strict=True)):
        assert isinstance(call, AllToAll)
        found = [len(rows) for rows in reply]
        if call.lengths is not None and found != list(call.lengths):
            raise WorkersDiverged(
                f"worker {rank} was sent {found} rows of {call.tag!r}, it expected {list(call.lengths)}"
            )
    return replies


def _describe(call: Collective) -> str:
    """What must be the same on all workers, in words."""
    tensor = call.tensor
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape: list[Any] = list(tensor.shape)
    extra = ""
    if isinstance(call, Broadcast):
        extra = f", root {call.root}"
    elif isinstance(call, AllGather):
        shape[0] = "any"
        extra = "" if call.lengths is None else f", lengths {list(call.lengths)}"
    elif isinstance(call, AllToAll):
        shape[0] = "any"
        extra = "" if call.lengths is None else ", lengths known"
    return f"{type(call).__name__}({call.tag!r}, {dtype} {shape}{extra})"


def _check_same(described: list[str], step: int) -> None:
    for rank, words in enumerate(described):
        if words != described[0]:
            raise WorkersDiverged(
                f"workers diverged at collective {step}: worker 0 {_asked(described[0])}, "
                f"worker {rank} {_asked(words)}"
            )


def _asked(words: str) -> str:
    return words if words == "finished" else f"asked for {words}"


def _check_lengths(calls: list[Collective]) -> None:
    for rank, call in enumerate(calls):
        assert isinstance(call, AllGather)
        if call.lengths is not None and len(call.tensor) != call.lengths[rank]:
            raise WorkersDiverged(
                f"worker {rank} handed {len(call.tensor)} rows to {call.tag!r}, announced were {call.lengths[rank]}"
            )
