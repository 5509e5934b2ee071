"""Totals over all steps since a sieve was attached, for people and for logs."""

from dataclasses import dataclass, replace

from gradsieve.comm.traffic import ring_all_reduce_bytes
from gradsieve.reports import StepReport

_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class Totals:
    """Totals of one worker. `str(totals)` is a short text; `fewer` is None before anything was sent."""

    n: int  # elements of the model
    world_size: int
    steps: int = 0  # completed optimizer steps
    skipped: int = 0  # because some value was not finite
    bytes_sent: float = 0.0  # what a worker puts on the wire, on average over workers
    covered: float = 0.0  # sum of the steps' densities
    communicated_s: float = 0.0
    hidden_s: float = 0.0  # part of it that the training loop did not wait for

    def with_step(self, report: StepReport) -> "Totals":
        """The totals after one more step or round."""
        return replace(
            self,
            steps=self.steps + report.finite,
            skipped=self.skipped + (not report.finite),
            bytes_sent=self.bytes_sent + report.ring_bytes,
            covered=self.covered + report.density * report.finite,
            communicated_s=self.communicated_s + report.seconds.get("communicate", 0.0),
            hidden_s=self.hidden_s + report.seconds.get("hidden", 0.0),
        )

    def with_silent_step(self) -> "Totals":
        """The totals after a step without a round."""
        return replace(self, steps=self.steps + 1)

    def with_full_exchange(self) -> "Totals":
        """The totals after one dense exchange that is not counted as a step."""
        return replace(self, covered=self.covered + 1, bytes_sent=self.bytes_sent + self.dense_step_bytes)

    @property
    def dense_step_bytes(self) -> float:
        """What plain data-parallel training sends in one step: a ring all-reduce of float32."""
        return ring_all_reduce_bytes(4 * self.n, self.world_size)

    @property
    def density(self) -> float:
        """Mean over the completed steps."""
        return self.covered / self.steps if self.steps else 0.0

    @property
    def fewer(self) -> float | None:
        """How many times fewer bytes than plain data-parallel training for as many steps."""
        return self.steps * self.dense_step_bytes / self.bytes_sent if self.bytes_sent else None

    def __str__(self) -> str:
        times = "" if self.fewer is None else f", {self.fewer:,.1f} times fewer bytes than plain DDP"
        skipped = f" ({self.skipped} skipped)" if self.skipped else ""
        hidden = f", {self.hidden_s:.1f} s of it hidden behind computing" if self.hidden_s else ""
        return (
            f"{self.steps:,} step{'s' * (self.steps != 1)}{skipped}, density {self.density:.3%} on average, "
            f"{_size(self.bytes_sent)} sent per worker{times}, "
            f"{self.communicated_s:.1f} s of communication{hidden}"
        )


def _size(value: float) -> str:
    for unit in _UNITS[:-1]:
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} {_UNITS[-1]}"
