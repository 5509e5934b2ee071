"""`density="auto"`: send as much as the network can during the next forward and backward pass.

An exchange takes a latency plus a time per byte, so its time is a line over the density. The line is measured
during training: now and then workers exchange how long computing and exchanging took, and all compute the same
density from the same numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from gradsieve._check import BadInput, dict_with, fraction, list_of, number
from gradsieve.comm.collectives import Program, all_gather

AT_LEAST, AT_MOST = 1e-3, 1.0
WINDOW = 8  # rounds that are measured before the density may change
HIDDEN, SHOWN = 0.8, 0.2  # time of an exchange as a fraction of the computing time, with delay=1 and delay=0
LARGEST_CHANGE = 4.0  # factor by which the density changes at most at a time
WORTH_IT = 1.1  # smallest factor by which the density is changed


@dataclass(frozen=True)
class Auto:
    """Limits of a density that follows the network: see `share`."""

    at_least: float = AT_LEAST
    at_most: float = AT_MOST

    def __post_init__(self) -> None:
        fraction("at_least", self.at_least)
        fraction("at_most", self.at_most)
        if self.at_least > self.at_most:
            raise BadInput(f"at_least must not be above at_most, {self.at_most}, got {self.at_least}")


@dataclass(frozen=True)
class Line:
    """Seconds of an exchange: `latency + slope * density`."""

    latency: float
    slope: float

    def density(self, seconds: float) -> float:
        """The density that can be exchanged in this time."""
        left = seconds - self.latency
        return left / self.slope if self.slope > 0 else math.copysign(math.inf, left)


class AutoDensity:
    """The density of each round, which follows the network. The state is the same on all workers."""

    def __init__(self, limits: Auto, allowed: float) -> None:
        self.limits, self.allowed = limits, allowed
        self.density = self.target = limits.at_least
        self.points: list[tuple[float, float]] = []  # density and seconds of the last two that differ
        self.why = "not measured yet"
        self._computing: list[float] = []
        self._exchanging: list[float] = []

    def at(self, step: int) -> float:
        return self.density

    def note(self, computing: float, exchanging: float) -> None:
        """Record the seconds of this worker's last step without the exchange, and of its last exchange."""
        self._computing.append(computing)
        self._exchanging.append(exchanging)

    def agree(self, world_size: int) -> Program[None]:
        """Before a round: choose a new density if enough was measured since the last change."""
        if len(self._exchanging) < WINDOW:  # the same on all workers: all made the same rounds
            return
        own = torch.tensor([median(self._computing), median(self._exchanging)], dtype=torch.float64)
        self._computing, self._exchanging = [], []
        rows = torch.cat((yield from all_gather("auto", own[None], [1] * world_size)))
        # The last worker to join an exchange waits for nobody: its time is that of the network.
        self.learn(sum(rows[:, 0].tolist()) / world_size, min(rows[:, 1].tolist()))

    def learn(self, computing: float, exchanging: float) -> None:
        """Choose the density from the seconds of a step, and of an exchange at the current density."""
        self.points = [point for point in self.points if not _alike(point[0], self.density)][-1:]
        self.points.append((self.density, exchanging))
        line, room = line_through(self.points), self.allowed * computing
        wanted = min(max(line.density(room), self.density / LARGEST_CHANGE), self.density * LARGEST_CHANGE)
        wanted = min(max(wanted, self.limits.at_least), self.limits.at_most)
        if max(wanted / self.density, self.density / wanted) >= WORTH_IT or wanted == self.limits.at_most:
            self.density = wanted
        self.why = (
            f"exchanging took {exchanging * 1e3:.3g} ms, {line.latency * 1e3:.3g} ms of it latency; "
            f"{room * 1e3:.3g} ms are free in {computing * 1e3:.3g} ms of computing"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"density": self.density, "points": [list(point) for point in self.points]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict_with("auto", state, ("density", "points"))
        points = [list_of("points", each) for each in list_of("points", state["points"])]
        if not all(len(each) == 2 for each in points):
            raise BadInput(f"points must be pairs of a density and seconds, got {points}")
        density = fraction("density", state["density"])
        points = [[fraction("density", each[0]), number("seconds", each[1])] for each in points]
        self.density, self.points = density, [(each[0], each[1]) for each in points]


def line_through(points: Sequence[tuple[float, float]]) -> Line:
    """The line through two points; from one alone, all of its time counts as latency's share and bytes' alike.

    >>> line_through([(0.01, 0.003), (0.02, 0.004)])
    Line(latency=0.002, slope=0.1)
    """
    density, seconds = points[-1]
    if len(points) < 2:
        return Line(seconds / 2, seconds / 2 / density)
    other, before = points[0]
    slope = max(0.0, (seconds - before) / (density - other))
    latency = min(max(0.0, seconds - slope * density), seconds)
    return Line(round(latency, 9), round(slope, 9))


def _alike(one: float, other: float) -> bool:
    return max(one / other, other / one) < WORTH_IT
