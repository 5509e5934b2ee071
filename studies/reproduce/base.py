"""What an experiment is: a claim, how it is tested, what was found, and a verdict."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from studies.reproduce.shelf import Shelf

REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
EXDYNA_PAPER, RETHINKING_PAPER, TOPK_ANALYSIS, OURS = "ExDyna", "Rethinking", "Top-k analysis", "this library"
POINTS = 300  # of a line
SOURCES = {  # what a claim is from
    EXDYNA_PAPER: "Yoon and Oh, Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep "
    "Learning, CCGrid 2024",
    RETHINKING_PAPER: "Sahu et al., Rethinking gradient sparsification as total error minimization, NeurIPS 2021",
    TOPK_ANALYSIS: "an empirical analysis of where Top-k's time goes",
    OURS: "this library's own claim",
}


@dataclass(frozen=True)
class Check:
    """One criterion, the figure that was measured, and whether it holds."""

    criterion: str
    found: str
    holds: bool


@dataclass(frozen=True)
class Line:
    """A line of a figure, or one bar per label if the figure has `bars`."""

    label: str
    x: list[float]
    y: list[float | None]


def thinned(label: str, x: Sequence[float], y: Sequence[float | None]) -> Line:
    """A line thinned to every nth point, so that there are not too many."""
    stride = -(-len(x) // POINTS)
    return Line(label, list(x[::stride]), list(y[::stride]))


@dataclass(frozen=True)
class Figure:
    """One figure, in the axes of the paper. `about` says how to read it."""

    key: str
    title: str
    x: str
    y: str
    lines: list[Line]
    about: str = ""
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Grid:
    """A table: the first column names the row."""

    title: str
    heads: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Finding:
    """What an experiment found. `note` gives the conditions and, if it failed, what was observed and why."""

    checks: list[Check]
    figures: list[Figure] = field(default_factory=list)
    tables: list[Grid] = field(default_factory=list)
    note: str = ""

    @property
    def verdict(self) -> str:
        return REPRODUCED if self.checks and all(check.holds for check in self.checks) else NOT_REPRODUCED

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> "Finding":
        figures = [
            Figure(**{**figure, "lines": [Line(**line) for line in figure["lines"]]})
            for figure in stored["figures"]
        ]
        checks, tables = [Check(**each) for each in stored["checks"]], [Grid(**each) for each in stored["tables"]]
        return cls(checks, figures, tables, stored["note"])


@dataclass(frozen=True)
class Experiment:
    """One experiment. `run` gets its runs from the shelf, which does not repeat finished ones."""

    id: str
    source: str  # a key of SOURCES
    claim: str
    minutes: float  # on 2 cores, in full
    run: Callable[[Shelf], Finding]
