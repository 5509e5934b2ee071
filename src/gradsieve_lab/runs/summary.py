"""A run in one row: pure functions of its record. Times are medians; means if only some steps exchange."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from gradsieve.comm.traffic import ring_all_reduce_bytes
from gradsieve_lab.runs.gains import gains_kept
from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.step_record import PHASES, StepRecord

_CLOSE = 0.05  # a step's density counts as kept within this fraction of the target


@dataclass(frozen=True)
class Summary:
    """One run; None is a value that its method does not have, or that was not measured."""

    method: str
    task: str
    dataset: str
    workers: int
    virtual: bool
    steps: int
    parameters: int
    metric_name: str
    metric_best: float | None
    metric_last: float | None
    gain_kept: float | None  # known only in a comparison with dense and alone
    loss_last: float | None
    density_target: float
    density_mean: float
    density_max: float
    density_last: float
    density_within_5pct: float  # fraction of the steps
    selected_total: int
    bytes_per_step: float  # what a worker puts on the wire with ring collectives
    bytes_total: float
    wire_bytes_per_step: float | None  # sent by a lab's host, counted by its interface, headers included
    compression: float | None  # bytes of plain data-parallel training over these
    collectives_per_step: float
    total_error: float | None  # sum over the steps of the workers' mean ||residual||^2
    residual_norm_last: float | None
    imbalance_mean: float
    buildup_mean: float | None
    forward_ms: float
    backward_ms: float
    select_ms: float
    communicate_ms: float
    step_ms: float
    hidden_ms: float | None  # communication per step that nobody waited for
    spread_mean: float | None  # of replicas: how far they were from their mean where weights were exchanged
    seconds: float  # of training; evaluations and measurements are not counted
    end: str  # finished, stopped, failed, or unfinished


def summarise_all(runs: Sequence[Run]) -> list[Summary]:
    """The summaries of a comparison."""
    return [replace(summarise(run), gain_kept=gain) for run, gain in zip(runs, gains_kept(runs), strict=True)]


def summarise(run: Run) -> Summary:
    """The summary of a run, finished or not."""
    steps, settings = run.steps, run.settings
    values = [line["value"] for line in run.metrics if line["value"] is not None]
    densities = _known(steps, "density")
    target = settings["density"]
    total = sum(_known(steps, "bytes"))
    errors, norms, buildups = (_known(steps, name) for name in ("error", "residual_norm", "buildup"))
    hidden, spreads = _known(steps, "hidden"), _known(steps, "spread")
    losses = _known(steps, "loss")
    exchanging = sum(step.collectives > 0 for step in steps)
    typical = fmean if 0 < exchanging < len(steps) else median  # a median would miss rounds in few steps
    phases = {f"{phase}_ms": _ms(typical, (step.seconds.get(phase) for step in steps)) for phase in PHASES}
    return Summary(
        method=run.name,
        task=settings["task"],
        dataset=settings["dataset"],
        workers=settings["workers"],
        virtual=settings["virtual"],
        steps=len(steps),
        parameters=run.header["n"],
        metric_name=run.metric.name,
        metric_best=(max if run.metric.higher_is_better else min)(values) if values else None,
        metric_last=values[-1] if values else None,
        gain_kept=None,
        loss_last=losses[-1] if losses else None,
        density_target=target,
        density_mean=_mean(densities),
        density_max=max(densities, default=0.0),
        density_last=densities[-1] if densities else 0.0,
        density_within_5pct=_mean([abs(density / target - 1) <= _CLOSE for density in densities]),
        selected_total=int(sum(_known(steps, "selected"))),
        bytes_per_step=total / len(steps) if steps else 0.0,
        bytes_total=total,
        wire_bytes_per_step=_mean(wire) if (wire := _known(steps, "wire_bytes")) else None,
        compression=dense_bytes(run) * len(steps) / total if total else None,
        collectives_per_step=_mean(_known(steps, "collectives")),
        total_error=sum(errors) if errors else None,
        residual_norm_last=norms[-1] if norms else None,
        imbalance_mean=_mean(_known(steps, "imbalance")),
        buildup_mean=_mean(buildups) if buildups else None,
        **phases,
        hidden_ms=_ms(typical, hidden) if any(hidden) else None,
        spread_mean=_mean(spreads) if spreads else None,
        seconds=sum(step.seconds.get("step") or 0.0 for step in steps),
        end=run.end["reason"] if run.end else "unfinished",
    )


def dense_bytes(run: Run) -> float:
    """Bytes sent per worker and step of plain data-parallel training: a ring all-reduce of float32."""
    return ring_all_reduce_bytes(4 * run.header["n"], run.settings["workers"])


def _known(steps: list[StepRecord], name: str) -> list[Any]:
    return [value for step in steps if (value := getattr(step, name)) is not None]


def _mean(values: list[Any]) -> float:
    return fmean(values) if values else 0.0


def _ms(typical: Callable[[list[float]], float], values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return typical(known) * 1e3 if known else 0.0
