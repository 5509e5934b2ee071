"""The outcome of a round: what to write, what the next round reads, the report, the error."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve._check import BadType, at_least, dict_with, sizes_of
from gradsieve.comm.step import Selection
from gradsieve.reports import StepReport
from gradsieve.share.weights import Where

_PENDING = ("mean", "target", "own", "counts")
_UNREAD = ("finite", "norms", "loads")  # names of tensors in checkpoints


@dataclass(frozen=True)
class Agreed:
    """The outcome of a round. `mean` and `counts` are the same on all workers."""

    where: Where
    mean: Tensor  # what `shared` becomes there
    target: Tensor  # what this worker's weights become: the mean, except for rounding errors of the wire type
    own: Tensor  # what they were when the round ran
    counts: list[int]  # how many positions each worker picked
    selection: Selection | None = None  # None: everything, or a round that was loaded
    spread: float | None = None  # how far `own` is from `mean`, relative to it
    beside: Tensor | None = None  # numbers about `where` that the sparsifier asked for, on the host
    unread: "Unread | None" = None  # both, where they are still on the device

    @property
    def union(self) -> int:
        return len(self.mean)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to apply it, for a checkpoint."""
        positions = torch.empty(0, dtype=torch.int64) if isinstance(self.where, slice) else self.where
        return {"where": positions, **{name: getattr(self, name) for name in _PENDING}}

    @classmethod
    def restored(cls, state: Mapping[str, Any], everything: slice, device: torch.device) -> "Agreed":
        """The outcome that `state_dict` describes."""
        state = dict_with("pending", state, ("where", *_PENDING, "report"))
        for name in ("where", "mean", "target", "own"):
            if not isinstance(state[name], Tensor):
                raise BadType(f"pending must have a tensor as {name}, got {state[name]!r}")
        sizes_of("counts", state["counts"])
        whole = len(state["where"]) == 0 and len(state["mean"]) == everything.stop
        parts = (state[name] for name in _PENDING)
        here: list[Any] = [part.to(device) if isinstance(part, Tensor) else part for part in parts]
        return cls(everything if whole else state["where"].to(device), *here)


@dataclass(frozen=True)
class NotFinite:
    """No agreement: some worker's weights are not finite. `bad[rank]` is the first such position, or -1."""

    bad: list[int]
    steps: int | None = None  # that were complete then, if an earlier round found it


@dataclass(frozen=True)
class Unread:
    """Numbers of a round that are still on the device: they are read together with the next round's histograms.

    Such a round changes nothing if its mean is not finite. All workers know the same flag, so all of them
    learn in the same round that an earlier one was not finite.
    """

    steps: int  # that were complete when the round ran
    counts: list[int]
    tensors: Sequence[Tensor]  # whether the mean is finite, norms, and what the sparsifier asked for

    def known(self) -> tuple[bool, float]:
        """Whether the mean is finite, and its spread. On a device the host waits here."""
        finite, norms = ops.read(*self.tensors[:2])
        return bool(finite), spread_of(norms)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"steps": self.steps, "counts": self.counts, **dict(zip(_UNREAD, self.tensors, strict=False))}

    @classmethod
    def restored(cls, state: Mapping[str, Any], device: torch.device) -> "Unread | None":
        """What `state_dict` describes; None for an empty state."""
        if not state:
            return None
        state = dict_with("unread", state, ("steps", "counts", *_UNREAD[:2]), _UNREAD)
        tensors = [state[name] for name in _UNREAD if name in state]
        if not all(isinstance(each, Tensor) for each in tensors):
            raise BadType(f"unread must have tensors as {', '.join(_UNREAD)}, got {tensors}")
        counts = sizes_of("counts", state["counts"])
        return cls(at_least("steps", state["steps"], 0), counts, [each.to(device) for each in tensors])


def spread_of(norms: Tensor) -> float:
    """How far a worker is from the mean, from two squared norms: of the mean, and of the difference."""
    size, away = norms.sqrt().tolist()
    return away / size if size else math.nan


class NonFiniteWeights(RuntimeError):
    """Some worker's weights are NaN or infinite: nothing was averaged, on any worker."""


@dataclass(frozen=True)
class ShareReport(StepReport):
    """One round. `step` is the number of completed optimizer steps when it ran."""

    round: int = 0
    restored: list[int] = field(default_factory=list)  # ranks whose weights were not finite and were restored
    # How far this worker's weights were from the mean at the exchanged positions, relative to that mean.
    spread: float | None = None
    why: str = ""  # reason for the density, with density="auto"

    @classmethod
    def of_checkpoint(cls, state: Any) -> "ShareReport":
        """A report from a checkpoint."""
        return cls(**dict_with("report", state, (), (each.name for each in fields(cls))))

    @property
    def drift_norm(self) -> float | None:
        """Norm of this worker's drift after the round; None unless it is measured, which costs a pass."""
        return self.residual_norm

    def _numbers(self) -> dict[str, float | None]:
        own = {"round": self.round, "restored": len(self.restored), "spread": self.spread}
        return {**super()._numbers(), **own}


def complaint(bad: Sequence[str], steps: int) -> str:
    """The error message if no mean was found; `bad` names parameters and their ranks."""
    if not bad:
        return f"the sum of all workers' drift after step {steps} is not finite: nothing was averaged"
    return f"weights are not finite after step {steps}: {', '.join(bad)}; nothing was averaged"
