"""A meter around any world: bytes and seconds of every collective, by tag."""

from collections.abc import Sequence
from typing import TypeVar

from gradsieve.comm.collectives import Program
from gradsieve.comm.traffic import Ledger, metered
from gradsieve.worlds.base import World

T = TypeVar("T")


class Meter:
    """Runs programs in another world; `ledgers[i]` is the traffic of the i-th program so far.

    >>> import torch
    >>> from gradsieve.comm.collectives import AllReduce
    >>> from gradsieve.worlds.virtual import VirtualWorld
    >>> def program():
    ...     yield AllReduce("values", torch.zeros(100))
    >>> meter = Meter(VirtualWorld(4))
    >>> _ = meter.run([program() for _ in range(4)])
    >>> meter.ledgers[0].total.handed_bytes, meter.ledgers[0].by_tag["values"].ring_bytes
    (400, 600.0)
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.ledgers: list[Ledger] = []

    @property
    def size(self) -> int:
        return self.world.size

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        self.ledgers += [Ledger() for _ in range(len(programs) - len(self.ledgers))]
        pairs = zip(programs, self.ledgers, strict=True)
        return self.world.run([metered(program, ledger, self.size) for program, ledger in pairs])
