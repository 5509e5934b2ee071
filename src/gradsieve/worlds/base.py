"""The interface of worlds."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from gradsieve.comm.collectives import Program

T = TypeVar("T")


class World(Protocol):
    """Runs programs and answers the collectives that they yield."""

    @property
    def size(self) -> int:
        """Number of workers, in all processes together."""

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Run the programs of the workers that live in this process; returns their results in the same order."""
