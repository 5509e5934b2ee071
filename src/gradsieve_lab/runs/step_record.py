"""One training step as a value: measured by an engine, averaged over the workers, written, read, and reported.

Exchange, Measured   what one worker knows of a step
StepRecord           the step of a run: what all workers share, and the mean of what they measured
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import fmean
from typing import Any, get_type_hints

from gradsieve.reports import StepReport

PHASES = ("forward", "backward", "select", "communicate", "step")  # of a step, in seconds; the last is all of it


@dataclass(frozen=True)
class Exchange:
    """The outcome of a step's exchange: the same on all workers."""

    finite: bool
    density: float
    k: int
    union: int
    selected: int
    imbalance: float
    buildup: float | None
    threshold: float | None
    collectives: int
    handshake_bytes: float | None = None  # before the first step, and again after a run was resumed


@dataclass(frozen=True)
class Measured:
    """One worker's own numbers; NaN where the method has none."""

    loss: float = math.nan
    error: float = math.nan  # squared norm of the residual
    residual_norm: float = math.nan
    bytes: float = 0.0
    wire_bytes: float = math.nan  # counted by a host's interface since the end of the last step
    spread: float = math.nan  # how far a replica was from the mean where weights were exchanged, relative to it
    hidden: float = math.nan  # seconds of communication that nobody waited for
    forward_s: float = 0.0
    backward_s: float = 0.0
    select_s: float = 0.0
    communicate_s: float = 0.0
    update_s: float = 0.0  # the optimizer
    measure_s: float = 0.0  # of norms, which is not part of the step
    step_s: float = 0.0

    def to_row(self) -> list[float]:
        return list(asdict(self).values())

    @classmethod
    def mean(cls, several: Sequence["Measured"]) -> "Measured":
        return cls(*map(fmean, zip(*(each.to_row() for each in several), strict=True)))


@dataclass(frozen=True)
class Stepped:
    """One step of one worker."""

    exchange: Exchange
    measured: Measured

    def with_measured(self, **numbers: float) -> "Stepped":
        return replace(self, measured=replace(self.measured, **numbers))


@dataclass(frozen=True)
class StepRecord:
    """One step of a run. None is a number that the method does not have, or that is not finite."""

    step: int  # from 0
    lr: float
    finite: bool
    density: float
    k: int
    union: int
    selected: int
    imbalance: float
    buildup: float | None
    threshold: float | None
    collectives: int
    handshake_bytes: float | None
    loss: float | None
    error: float | None
    residual_norm: float | None
    bytes: float
    wire_bytes: float | None
    spread: float | None
    hidden: float | None
    seconds: Mapping[str, float | None]  # by phase: see `PHASES`

    @classmethod
    def of(cls, step: int, lr: float, exchange: Exchange, mean: Measured) -> "StepRecord":
        """Make a record from what all workers share, and the mean of what they measured."""
        numbers = {name: _known(value) for name, value in asdict(mean).items()}
        seconds = {phase: numbers[f"{phase}_s"] for phase in PHASES}
        return cls(
            step=step,
            lr=lr,
            **asdict(exchange),
            loss=numbers["loss"],
            error=numbers["error"],
            residual_norm=numbers["residual_norm"],
            bytes=mean.bytes,
            wire_bytes=numbers["wire_bytes"],
            spread=numbers["spread"],
            hidden=numbers["hidden"],
            seconds=seconds,
        )

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> "StepRecord":
        """The inverse of `to_line`. Raises `ValueError` if a number is missing or invalid."""
        hints = get_type_hints(cls)
        for each in fields(cls):
            if each.name != "seconds" and not _fits(line.get(each.name), hints[each.name]):
                raise ValueError(f"{each.name} is {line.get(each.name)!r} in step {line.get('step')}")
        seconds = line.get("seconds")
        if not isinstance(seconds, Mapping) or not all(_fits(value, float | None) for value in seconds.values()):
            raise ValueError(f"seconds is {seconds!r} in step {line.get('step')}")
        return cls(**{each.name: line.get(each.name) for each in fields(cls)})  # type: ignore[arg-type]

    def to_line(self) -> dict[str, Any]:
        return {"kind": "step", **asdict(self)}


def from_report(report: StepReport) -> Stepped:
    """Convert a sieve's report to a record's terms."""
    seconds = report.seconds
    norm = math.nan if report.residual_norm is None else report.residual_norm
    exchange = Exchange(
        finite=report.finite,
        density=report.density,
        k=report.k,
        union=report.union,
        selected=report.selected,
        imbalance=report.imbalance,
        buildup=report.buildup,
        threshold=report.threshold,
        collectives=report.collectives,
        handshake_bytes=report.handshake_bytes or None,
    )
    measured = Measured(
        error=norm**2,
        residual_norm=norm,
        bytes=report.ring_bytes,
        spread=math.nan if (spread := getattr(report, "spread", None)) is None else spread,
        hidden=seconds.get("hidden", math.nan),
        select_s=sum(seconds.get(phase, 0.0) for phase in ("accumulate", "select", "update", "write")),
        communicate_s=seconds["communicate"],
        measure_s=seconds.get("measure", 0.0),
    )
    return Stepped(exchange, measured)


def all_at_once(
    n: int,
    *,
    collectives: int = 0,
    ring_bytes: float = 0.0,
    select_s: float = 0.0,
    communicate_s: float = 0.0,
    exact: bool = False,
) -> Stepped:
    """A step that sends all `n` elements; with n = 0 one that sends nothing.

    Args:
        exact: what arrives is the exact mean gradient, so nothing is held back.
    """
    error = 0.0 if exact else math.nan
    exchange = Exchange(True, float(n > 0), n, n, n, 1.0, 1.0 if exact else None, None, collectives)
    measured = Measured(
        error=error, residual_norm=error, bytes=ring_bytes, select_s=select_s, communicate_s=communicate_s
    )
    return Stepped(exchange, measured)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON is of this type; integers count as floats, too."""
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, hint) or (isinstance(value, int) and isinstance(0.0, hint))


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
