"""What is known of a training step once gradients were brought together."""

from dataclasses import dataclass
from math import nan
from typing import Any

from gradsieve.reports import StepReport

# Numbers in which workers differ; a record has their mean over the workers.
OWN = (
    "loss",
    "error",
    "residual_norm",
    "bytes",
    "spread",  # how far a replica was from the mean where weights were exchanged, relative to it
    "hidden",  # seconds of communication that nobody waited for
    "wire_bytes",  # what a host's interface counted from the end of the last step to the end of this one
    "forward",
    "backward",
    "select",
    "communicate",
    "step",
)
SECONDS = ("forward", "backward", "select", "communicate", "step")


@dataclass
class Facts:
    """One step: what is the same on all workers, and this worker's own numbers (NaN: the method has no such)."""

    shared: dict[str, Any]
    own: dict[str, float]


def facts_of(report: StepReport) -> Facts:
    """A sieve's report in the words of a record."""
    seconds = report.seconds
    norm = nan if report.residual_norm is None else report.residual_norm
    shared = {
        "finite": report.finite,
        "density": report.density,
        "k": report.k,
        "union": report.union,
        "selected": report.selected,
        "imbalance": report.imbalance,
        "buildup": report.buildup,
        "threshold": report.threshold,
        "collectives": report.collectives,
    }
    own = {
        "error": norm**2,
        "residual_norm": norm,
        "bytes": report.ring_bytes,
        "select": sum(seconds.get(phase, 0.0) for phase in ("accumulate", "select", "update", "write")),
        "communicate": seconds["communicate"],
        "spread": nan if (spread := getattr(report, "spread", None)) is None else spread,
        "hidden": seconds.get("hidden", nan),
        "measure": seconds.get("measure", 0.0),
    }
    return Facts(shared, own)


def full_facts(
    n: int,
    *,
    collectives: int = 0,
    ring_bytes: float = 0.0,
    select: float = 0.0,
    communicate: float = 0.0,
    exact: bool = False,
) -> Facts:
    """A step that sends for all `n` elements at once; with n = 0 one that sends nothing.

    Args:
        exact: what arrives is the exact mean gradient, so that nothing is held back.
    """
    error = 0.0 if exact else nan
    shared = {
        "finite": True,
        "density": float(n > 0),
        "k": n,
        "union": n,
        "selected": n,
        "imbalance": 1.0,
        "buildup": 1.0 if exact else None,
        "threshold": None,
        "collectives": collectives,
    }
    own = {
        "error": error,
        "residual_norm": error,
        "bytes": ring_bytes,
        "select": select,
        "communicate": communicate,
        "spread": nan,
        "hidden": nan,
        "measure": 0.0,
    }
    return Facts(shared, own)
