"""Figure 1 of the paper on total error: SGD, Top-k and a hard threshold at equal bits, on logistic regression.

Error feedback acts on `gamma * g` there and on `g` here. With a constant step gamma that is the same up to scale:
the paper's threshold is divided by gamma, and squared norms are multiplied by gamma^2 before they are shown.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from gradsieve_lab.analysis import bits, total_error
from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.settings import Settings
from gradsieve_lab.tasks.logreg import LogReg
from studies.reproduce._equal_bits import EQUAL, Tuned, equal_bits
from studies.reproduce.base import (
    RETHINKING_PAPER,
    Check,
    Experiment,
    Figure,
    Finding,
    Grid,
    Line,
    thinned,
)
from studies.reproduce.shelf import Shelf, dataset

SGD, TOPK, HARD = "SGD", "Top-k", "hard threshold"
WORKERS = 20
EVALUATIONS = 20  # an epoch
EARLY = (1.0, 2.0)  # epochs
HARD_NEAR, TOPK_FAR = 3.0, 10.0  # times SGD's f - f*
GOAL = 1e-2  # f - f*
PEAK, SUM = 10.0, 2.0  # Top-k's error over hard threshold's, at least


@dataclass(frozen=True)
class Case:
    """A data set with the paper's k and its threshold on `gamma * g`."""

    dataset: str
    k: int
    threshold: float
    epochs: int = 10
    width: float = 1.0
    limit: int = 0


FULL = (Case("madelon", 1, 5e-4), Case("synthetic", 10, 5e-3), Case("gisette", 10, 5e-3))
QUICK = (Case("madelon", 1, 5e-4, epochs=3), Case("synthetic", 1, 5e-3, epochs=3, width=0.1, limit=2000))


@dataclass(frozen=True)
class Curve:
    """One method, in the paper's units."""

    epochs: list[float]  # of the evaluations
    gaps: list[float]  # f - f*
    bits: list[float]  # bits sent by then, mean over workers
    errors: list[float]  # mean ||e||^2, after every step

    def early(self) -> float:
        """The median of f - f* in the first epochs: with one sample per step, single values are noisy."""
        return median(
            gap for epoch, gap in zip(self.epochs, self.gaps, strict=True) if EARLY[0] <= epoch <= EARLY[1]
        )

    def late(self) -> float:
        """The median of f - f* in the last epoch."""
        last = self.epochs[-1] - 1
        return median(gap for epoch, gap in zip(self.epochs, self.gaps, strict=True) if epoch >= last)

    def bits_to(self, goal: float) -> float | None:
        """Bits sent when f - f* first reached the goal; None if it never did."""
        return next((sent for sent, gap in zip(self.bits, self.gaps, strict=True) if gap <= goal), None)


@dataclass(frozen=True)
class Measured:
    """One data set: its curves by method, and what else the criteria need."""

    name: str
    features: int
    steps: int
    k: int
    published: float  # the paper's threshold on gamma * g
    threshold: float  # the one in use
    way: float  # from the first weights to the best ones, in each coordinate
    curves: dict[str, Curve]

    @property
    def ratio(self) -> float:
        """Hard threshold's bits over Top-k's, of the whole run."""
        return self.curves[HARD].bits[-1] / self.curves[TOPK].bits[-1]

    def about(self) -> str:
        how = "as published" if self.threshold == self.published else f"tuned, published {self.published:g}"
        return (
            f"{self.name}: {WORKERS} workers, one sample each a step, {self.steps} steps; top-{self.k} against the "
            f"threshold {self.threshold:.4g} on gamma*g ({how}), which sent {self.ratio:.3f}x as many bits."
        )


def cases(quick: bool) -> list[Case]:
    """Cases whose data are available; only the first of them in a quick run."""
    found = [
        case
        for case in (QUICK if quick else FULL)
        if case.dataset == "synthetic" or dataset("logreg", case.dataset)
    ]
    return found[:1] if quick else found


def measure(shelf: Shelf, case: Case) -> Measured:
    base = Settings(
        "logreg",
        dataset=case.dataset,
        width=case.width,
        limit=case.limit,
        workers=WORKERS,
        virtual=True,
        save=False,
    )
    name = f"fig1-{case.dataset}-w{case.width:g}-l{case.limit}"
    facts = shelf.measure(name, lambda: _facts(base))
    each, gamma, features = facts["samples"] // WORKERS, facts["gamma"], facts["features"]
    settings = Settings(
        **{
            **base.as_dict(),
            "steps": case.epochs * each,
            "eval_every": max(1, each // EVALUATIONS),
            "density": case.k / features,
        }
    )
    # A threshold published for other data is only a first guess.
    enough = EQUAL if case.dataset != "synthetic" else 0.0
    tuned = equal_bits(shelf, f"{name}-e{case.epochs}-threshold", settings, case.k, case.threshold / gamma, enough)
    methods = {
        SGD: "dense",
        TOPK: "topk:aggregation=own",
        HARD: f"hard_threshold:aggregation=own:threshold={tuned.threshold!r}",
    }
    runs = shelf.compare(settings, methods)
    return Measured(
        name=_name(case, facts),
        features=features,
        steps=settings.steps,
        k=case.k,
        published=case.threshold,
        threshold=_in_use(tuned, case, gamma),
        way=facts["way"],
        curves={label: _curve(run, each, gamma) for label, run in runs.items()},
    )


def _facts(settings: Settings) -> dict[str, Any]:
    task = settings.make_task()
    assert isinstance(task, LogReg)
    model = task.make_model()
    task.start(model)
    way = float((next(model.parameters()).detach() - task.problem.minimum[0]).abs().max())
    samples, features = task.problem.rows.shape
    return {"samples": samples, "features": features, "gamma": task.recipe.lr, "way": way}


def _name(case: Case, facts: dict[str, Any]) -> str:
    kind = "synthetic, of gisette's kind" if case.dataset == "synthetic" else f"{case.dataset}, real"
    return f"{kind}, {facts['samples']} x {facts['features']}"


def _in_use(tuned: Tuned, case: Case, gamma: float) -> float:
    return case.threshold if tuned.threshold == case.threshold / gamma else tuned.threshold * gamma


def _curve(run: Run, each: int, gamma: float) -> Curve:
    """Bits per worker: 64 for an element with its position; for SGD all values without positions."""
    n, sent, total = run.header["n"], [0.0], 0.0
    for line in run.steps:
        total += bits(n, "values") if run.settings["sparsifier"] == "dense" else bits(line.selected) / WORKERS
        sent.append(total)
    at = [line["step"] for line in run.metrics]
    return Curve(
        epochs=[step / each for step in at],
        gaps=[math.inf if line["value"] is None else line["value"] for line in run.metrics],
        bits=[sent[step] for step in at],
        errors=[gamma**2 * (line.error or 0.0) for line in run.steps],
    )


def judge_a(found: Sequence[Measured]) -> Finding:
    """f - f* against epochs."""
    checks = []
    for each in found:
        sgd, topk, hard = (each.curves[label].early() for label in (SGD, TOPK, HARD))
        where = f"{each.name}: median f - f* of epochs {EARLY[0]:g} to {EARLY[1]:g}"
        checks += [
            Check(
                f"{where}, hard threshold at most {HARD_NEAR:g}x SGD",
                f"{hard:.3g} / {sgd:.3g} = {hard / sgd:.2f}x",
                hard <= HARD_NEAR * sgd,
            ),
            Check(
                f"{where}, Top-k at least {TOPK_FAR:g}x SGD",
                f"{topk:.3g} / {sgd:.3g} = {topk / sgd:.1f}x",
                topk >= TOPK_FAR * sgd,
            ),
        ]
    figures = [
        Figure(
            f"fig1a-{number}",
            each.name,
            "epoch",
            "f - f*",
            [_line(label, curve.epochs, curve.gaps) for label, curve in each.curves.items()],
            log_y=True,
        )
        for number, each in enumerate(found)
    ]
    return Finding(checks, figures, note=_note(found))


def judge_b(found: Sequence[Measured]) -> Finding:
    """f - f* against bits."""
    checks, rows = [], []
    for each in found:
        topk, hard = (each.curves[label].bits_to(GOAL) for label in (TOPK, HARD))
        checks += [
            Check(
                f"{each.name}: hard threshold reaches f - f* = {GOAL:g} with fewer bits than Top-k",
                f"{_sent(hard)} against {_sent(topk)}",
                hard is not None and (topk is None or hard < topk),
            ),
            Check(
                f"{each.name}: as many bits in all, within {EQUAL:.0%}",
                f"hard threshold {each.ratio:.3f}x Top-k",
                abs(each.ratio - 1) <= EQUAL,
            ),
        ]
        rows += [
            [
                f"{each.name}: {label}",
                _sent(curve.bits_to(GOAL)),
                f"{curve.bits[-1]:.3g}",
                f"{min(curve.gaps):.2g}",
                f"{curve.late():.2g}",
            ]
            for label, curve in each.curves.items()
        ]
    figures = [
        Figure(
            f"fig1b-{number}",
            each.name,
            "bits a worker has sent",
            "f - f*",
            [_line(label, curve.bits, curve.gaps) for label, curve in each.curves.items()],
            about="64 bits an element with its position, 32 an element for SGD. Bits begin after the first step.",
            log_x=True,
            log_y=True,
        )
        for number, each in enumerate(found)
    ]
    heads = [
        "data and method",
        f"bits until f - f* = {GOAL:g}",
        "bits in all",
        "least f - f*",
        "median of the last epoch",
    ]
    return Finding(checks, figures, [Grid("Bits that a worker sends", heads, rows)], _note(found))


def judge_c(found: Sequence[Measured]) -> Finding:
    """Errors against epochs."""
    checks, rows = [], []
    for each in found:
        topk, hard = (each.curves[label].errors for label in (TOPK, HARD))
        peaks, sums = (max(topk), max(hard)), (total_error(topk), total_error(hard))
        bound = each.threshold**2 * each.features
        checks += [
            Check(
                f"{each.name}: peak of mean ||e||^2, Top-k at least {PEAK:g}x hard threshold",
                f"{peaks[0]:.3g} / {peaks[1]:.3g} = {peaks[0] / peaks[1]:.1f}x",
                peaks[0] >= PEAK * peaks[1],
            ),
            Check(
                f"{each.name}: sum over the steps, Top-k at least {SUM:g}x hard threshold",
                f"{sums[0]:.3g} / {sums[1]:.3g} = {sums[0] / sums[1]:.1f}x",
                sums[0] >= SUM * sums[1],
            ),
            Check(
                f"{each.name}: hard threshold's mean ||e||^2 never above lambda^2 n = {bound:.3g}",
                f"at most {peaks[1]:.3g}, {peaks[1] / bound:.0%} of it",
                peaks[1] <= bound,
            ),
        ]
        rows += [
            [f"{each.name}: {label}", f"{max(curve.errors):.3g}", f"{total_error(curve.errors):.3g}"]
            for label, curve in each.curves.items()
            if label != SGD
        ]
    figures = [
        Figure(
            f"fig1c-{number}",
            each.name,
            "epoch",
            "mean ||e||^2",
            [
                _line(label, [_epoch(each, step) for step in range(each.steps)], each.curves[label].errors)
                for label in (TOPK, HARD)
            ],
            about="In the paper's units, that is of gamma * g.",
            log_y=True,
        )
        for number, each in enumerate(found)
    ]
    grid = Grid("Mean ||e||^2 over the workers", ["data and method", "peak", "sum over the steps"], rows)
    return Finding(checks, figures, [grid], _note(found))


def _epoch(each: Measured, step: int) -> float:
    return (step + 1) / each.steps * each.curves[TOPK].epochs[-1]


def _sent(value: float | None) -> str:
    return "never" if value is None else f"{value:.3g} bits"


def _line(label: str, x: Sequence[float], y: Sequence[float]) -> Line:
    """A thinned line, without what a logarithmic axis cannot show."""
    shown = [(a, b if 0 < b < math.inf else None) for a, b in zip(x, y, strict=True) if a > 0]
    return thinned(label, [a for a, _ in shown], [b for _, b in shown])


def _note(found: Sequence[Measured]) -> str:
    """The conditions, and their limits."""
    lines = [each.about() for each in found]
    for each in found:
        if each.threshold > each.way:
            lines.append(
                f"{each.name}: what hard threshold may leave unsent in a coordinate, {each.threshold:.2g}, is "
                f"{each.threshold / each.way:.1f}x the whole way from start to optimum, {each.way:.2g}: it may "
                "move late and overshoot."
            )
        best = min(each.curves[SGD].gaps)
        if best > GOAL:
            lines.append(f"{each.name}: SGD itself came no nearer than f - f* = {best:.2g}.")
    return " ".join([*lines, "One seed. Elements are counted for each worker's own picks, as in the paper."])


def _run(judge: Callable[[Sequence[Measured]], Finding]) -> Callable[[Shelf], Finding]:
    return lambda shelf: judge([measure(shelf, case) for case in cases(shelf.quick)])


EXPERIMENTS = (
    Experiment(
        id="fig1a",
        source=RETHINKING_PAPER,
        claim="At equal bits a hard threshold converges like SGD from the start, and Top-k far behind.",
        minutes=8,
        run=_run(judge_a),
    ),
    Experiment(
        id="fig1b",
        source=RETHINKING_PAPER,
        claim="A hard threshold reaches a given f - f* with fewer bits than Top-k.",
        minutes=8,
        run=_run(judge_b),
    ),
    Experiment(
        id="fig1c",
        source=RETHINKING_PAPER,
        claim="Top-k's error has a high peak early on and a larger sum; a hard threshold's is bounded.",
        minutes=8,
        run=_run(judge_c),
    ),
)
