"""The report of one step, and the clock that measures its phases."""

import math
import time
from dataclasses import dataclass
from typing import Any, Self

from gradsieve.comm.step import Sent, Step
from gradsieve.comm.traffic import Ledger


@dataclass(frozen=True)
class StepReport:
    """What one step did. Everything except `residual_norm`, bytes and seconds is the same on all workers."""

    step: int
    n: int
    k: int  # the target: density * n
    finite: bool  # False: some gradient was not finite, the step was skipped
    counts: list[int]  # how many positions each worker picked
    union: int  # how many positions the update covers
    threshold: float | None  # that decided this step; None if there was none
    residual_norm: float | None  # None unless the reducer was made with measure=True
    bytes_sent: int  # passed to collectives, padding included
    ring_bytes: float  # that a worker puts on the wire, on average over workers
    collectives: int
    seconds: dict[str, float]  # by phase: accumulate, select, update, write, communicate, measure (the norm)
    handshake_bytes: float = 0.0  # on the wire to compare settings before this step; not in the figures above

    @classmethod
    def of(
        cls,
        step: Step,
        sent: Sent,
        clock: "Clock",
        *,
        threshold: float | None,
        residual_norm: float | None = None,
        **further: Any,
    ) -> Self:
        """Make the report of a step from its request, its result and its cost."""
        total = clock.ledger.total
        return cls(
            step=step.index,
            n=step.n,
            k=step.k,
            finite=sent.finite,
            counts=sent.counts,
            union=sent.union,
            threshold=threshold,
            residual_norm=residual_norm,
            bytes_sent=total.handed_bytes,
            ring_bytes=total.ring_bytes,
            collectives=total.calls,
            seconds={**clock.seconds, "communicate": total.seconds},
            **further,
        )

    @property
    def selected(self) -> int:
        return sum(self.counts)

    @property
    def density(self) -> float:
        """The fraction of the gradient that the update covers."""
        return self.union / self.n

    @property
    def imbalance(self) -> float:
        """`max(counts) * world_size / sum(counts)`: 1 is perfect."""
        return max(self.counts) * len(self.counts) / self.selected if self.selected else 1.0

    @property
    def buildup(self) -> float:
        """Number of positions sent, divided by k."""
        return self.union / self.k

    def scalars(self) -> dict[str, float]:
        """All numbers under flat names such as `gradsieve/density`, for TensorBoard, W&B, MLflow and the like.

        Numbers that are unknown or not finite are left out.
        """
        numbers = self._numbers() | {f"{phase}_ms": 1e3 * seconds for phase, seconds in self.seconds.items()}
        known = {name: float(value) for name, value in numbers.items() if value is not None}
        return {f"gradsieve/{name}": value for name, value in known.items() if math.isfinite(value)}

    def _numbers(self) -> dict[str, float | None]:
        names = ("density", "k", "union", "imbalance", "buildup", "finite", "threshold", "residual_norm")
        counted = ("bytes_sent", "ring_bytes", "collectives")
        return {name: getattr(self, name) for name in (*names, *counted)}


class Clock:
    """Seconds by phase, without those spent waiting for replies."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.seconds: dict[str, float] = {}
        self.skip()

    def skip(self) -> None:
        """Assign the time since the last lap to no phase."""
        self._last, self._waited = time.perf_counter(), self.ledger.total.seconds

    def lap(self, phase: str) -> None:
        """Assign the time since the last lap to a phase."""
        spent = time.perf_counter() - self._last - (self.ledger.total.seconds - self._waited)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + spent
        self.skip()
