"""Does Top-k lose more accuracy relative to dense training with larger batches? The same epochs, so fewer steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from statistics import linear_regression

from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.settings import Settings
from studies.reproduce.base import TOPK_ANALYSIS, Check, Experiment, Figure, Finding, Grid, Line
from studies.reproduce.shelf import Shelf, dataset

DENSE, TOPK = "dense", "Top-k"
METHODS = {DENSE: "dense", TOPK: "topk:aggregation=own"}
WORKERS, WIDTH, DENSITY = 2, 0.5, 0.001
EVALUATIONS = 4  # after the start, evenly spaced


@dataclass(frozen=True)
class Size:
    dataset: str
    examples: int
    epochs: int
    batches: tuple[int, ...]  # of one worker


FULL = Size("mnist", 2000, 6, (8, 16, 32, 64, 128))
QUICK = Size("", 1000, 4, (8, 32, 128))


@dataclass(frozen=True)
class Point:
    """One batch size, of all workers together."""

    batch: int
    steps: int
    dense: float
    topk: float

    @property
    def gap(self) -> float:
        return self.dense - self.topk


def judge(points: Sequence[Point], note: str) -> Finding:
    first, last = points[0], points[-1]
    slope = linear_regression([log2(point.batch) for point in points], [point.gap for point in points]).slope
    checks = [
        Check(
            f"dense - Top-k is larger at batch {last.batch} than at batch {first.batch}",
            f"{100 * last.gap:.1f} against {100 * first.gap:.1f} points",
            last.gap > first.gap,
        ),
        Check(
            "over all batch sizes the gap grows: the slope of a line through it against log2(batch) is positive",
            f"{100 * slope:+.2f} points for each doubling",
            slope > 0,
        ),
    ]
    x = [float(point.batch) for point in points]
    figures = [
        Figure(
            "batch-gap",
            "What Top-k loses",
            "batch of all workers",
            "points of accuracy, dense - Top-k",
            [Line("dense - Top-k", x, [100 * point.gap for point in points])],
            log_x=True,
        ),
        Figure(
            "batch-accuracy",
            "Accuracy at the end",
            "batch of all workers",
            "accuracy",
            [Line(DENSE, x, [point.dense for point in points]), Line(TOPK, x, [point.topk for point in points])],
            log_x=True,
        ),
    ]
    heads = ["batch", "steps", DENSE, TOPK, "gap in points"]
    rows = [
        [str(point.batch), str(point.steps), f"{point.dense:.1%}", f"{point.topk:.1%}", f"{100 * point.gap:.1f}"]
        for point in points
    ]
    if not all(check.holds for check in checks):
        note += (
            f" Dense itself ends at {last.dense:.1%} after the {last.steps} steps of the largest batch, "
            f"and at {first.dense:.1%} after the {first.steps} of the smallest."
        )
    return Finding(checks, figures, [Grid("Accuracy by batch size", heads, rows)], note)


def run(shelf: Shelf) -> Finding:
    size = QUICK if shelf.quick else FULL
    data = dataset("resnet", size.dataset) if size.dataset else ""
    points, model = [], {}
    for batch in size.batches:
        examples = size.examples // WORKERS
        steps = size.epochs * (examples // batch)
        settings = Settings(
            "resnet",
            dataset=data,
            width=WIDTH,
            density=DENSITY,
            limit=size.examples,
            workers=WORKERS,
            virtual=True,
            batch=batch,
            steps=steps,
            eval_every=max(1, steps // EVALUATIONS),
            save=False,
        )
        runs = shelf.compare(settings, METHODS)
        model = runs[DENSE].header
        points.append(Point(WORKERS * batch, steps, _last(runs[DENSE]), _last(runs[TOPK])))
    note = (
        f"ResNet-20 of {model['n']} parameters ({WIDTH:g} of its channels) on {size.examples} images of "
        f"{model['settings']['dataset']} ({'real' if data else 'embedded'}), {size.epochs} epochs for every batch "
        f"size, {WORKERS} workers, density {DENSITY:g}, one seed; the learning rate grows with the batch."
    )
    return judge(points, note)


def _last(run: Run) -> float:
    """Accuracy at the end."""
    return run.metrics[-1]["value"] or 0.0


EXPERIMENT = Experiment(
    id="batch",
    source=TOPK_ANALYSIS,
    claim="With the same epochs, Top-k falls the farther behind dense training the larger the batch.",
    minutes=8,
    run=run,
)
