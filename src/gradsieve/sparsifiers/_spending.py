"""How many elements to send in a step."""

from typing import Protocol

from gradsieve.exchange import Step
from gradsieve.sparsifiers._table import Table


class Spending(Protocol):
    """Decides how many elements are sent, knowing how many lie above each level."""

    def count(self, table: Table, step: Step) -> int: ...


class Steady:
    """As many in every step as the density asks for."""

    def count(self, table: Table, step: Step) -> int:
        return step.k
