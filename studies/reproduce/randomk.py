"""Random-k against Top-k at the same density: it matters which elements are sent."""

from dataclasses import dataclass
from statistics import fmean

from gradsieve_lab.runs.settings import Settings
from studies.reproduce.base import TOPK_ANALYSIS, Check, Experiment, Figure, Finding, Grid, Line
from studies.reproduce.shelf import Shelf, dataset

DENSE, TOPK, RANDOM = "dense", "Top-k", "random-k"
METHODS = {DENSE: "dense", TOPK: "topk:aggregation=own", RANDOM: "randomk"}
CLEARLY = 0.05  # of accuracy
WIDTH, DENSITY, WORKERS = 0.125, 0.01, 4
STEPS, QUICK_STEPS = 400, 150
EVALUATIONS = 10


@dataclass(frozen=True)
class Curve:
    steps: list[int]
    accuracy: list[float]

    @property
    def last(self) -> float:
        """The mean of the last two evaluations: with batch normalisation single ones are noisy."""
        return fmean(self.accuracy[-2:])


def judge(curves: dict[str, Curve], note: str) -> Finding:
    topk, random = curves[TOPK].last, curves[RANDOM].last
    check = Check(
        f"random-k ends at least {100 * CLEARLY:g} points of accuracy below Top-k",
        f"{random:.1%} against {topk:.1%}: {100 * (topk - random):.1f} points",
        topk - random >= CLEARLY,
    )
    lines = [Line(label, [*map(float, curve.steps)], [*curve.accuracy]) for label, curve in curves.items()]
    figure = Figure("random", "Accuracy at the same density", "step", "accuracy", lines)
    rows = [[label, f"{curve.last:.1%}"] for label, curve in curves.items()]
    if not check.holds and topk < curves[DENSE].last - CLEARLY:
        behind = 100 * (curves[DENSE].last - topk)
        note += f" Top-k is itself {behind:.1f} points below dense: too few steps for either."
    return Finding([check], [figure], [Grid("Accuracy at the end", ["method", "accuracy"], rows)], note)


def run(shelf: Shelf) -> Finding:
    data = "" if shelf.quick else dataset("vgg", "mnist")
    steps = QUICK_STEPS if shelf.quick else STEPS
    settings = Settings(
        "vgg",
        dataset=data,
        width=WIDTH,
        density=DENSITY,
        workers=WORKERS,
        virtual=True,
        steps=steps,
        eval_every=max(1, steps // EVALUATIONS),
        limit=4000 if data else 0,
        save=False,
    )
    runs = shelf.compare(settings, METHODS)
    curves = {
        label: Curve([line["step"] for line in run.metrics], [line["value"] or 0.0 for line in run.metrics])
        for label, run in runs.items()
    }
    found = runs[DENSE].settings
    note = (
        f"VGG-16 of {runs[DENSE].header['n']} parameters ({WIDTH:g} of its channels) on {found['dataset']} "
        f"({'real' if data else 'embedded'}), {WORKERS} workers, batch {found['batch']} each, {steps} steps, "
        f"density {DENSITY:g}, one seed. Every worker sends its own k values with Top-k, and k values at common "
        "places with random-k. That 5 points are clear is this experiment's choice."
    )
    return judge(curves, note)


EXPERIMENT = Experiment(
    id="random",
    source=TOPK_ANALYSIS,
    claim="At the same density, random elements train clearly worse than the largest.",
    minutes=5,
    run=run,
)
