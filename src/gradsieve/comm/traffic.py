"""The meter: bytes and seconds of every collective that a program yields."""

import time
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gradsieve.comm.collectives import AllReduce, AllToAll, Broadcast, Collective, Program

T = TypeVar("T")

LENGTH_BYTES = 8  # that a rank sends to announce the length of a message


@dataclass
class Traffic:
    """Traffic of all collectives with one tag."""

    calls: int = 0
    handed_bytes: int = 0  # what this worker passed to the collectives, padding included
    # Bytes that a worker puts on the wire, as a ring would send them: the mean over workers, but for all-to-alls
    # its own, as it does not know what others send each other.
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


def metered(program: Program[T], ledger: Ledger, world_size: int) -> Program[T]:
    """`program` unchanged, with every collective that it yields entered in `ledger`."""
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


def traffic_of(call: Collective, reply: Any, world_size: int) -> Traffic:
    """The bytes of one answered collective. If lengths are not known, it is two calls: lengths, rows."""
    others = world_size - 1
    size = call.tensor.nbytes
    if isinstance(call, AllReduce):
        padded = world_size * -(-call.tensor.numel() // world_size) * call.tensor.element_size()
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


def ring_all_reduce_bytes(size: int, world_size: int) -> float:
    """Bytes that a worker puts on the wire in a ring all-reduce of `size` bytes."""
    return 2 * (world_size - 1) / world_size * size
