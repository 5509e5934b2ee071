"""Where a step's time goes, sparsifier by sparsifier, in real processes: forward, backward, select, communicate."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median

from gradsieve.sparsifiers import SPARSIFIERS
from gradsieve_lab.runs.methods import DENSE, is_hook
from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.settings import Settings
from studies.reproduce.base import TOPK_ANALYSIS, Check, Experiment, Figure, Finding, Grid, Line
from studies.reproduce.shelf import Shelf, dataset

DENSITY, WORKERS, BATCH = 0.001, 4, 8
TOPK, EXDYNA = "topk", "exdyna"
FEW = (DENSE, TOPK, "cltk", EXDYNA)  # where it must be quick
PHASES = ("forward", "backward", "select", "communicate")
SETTLED = 12  # initial steps that do not count: sparsifiers search more in them
LARGEST, LONGER = 0.5, 3.0


@dataclass(frozen=True)
class Sizes:
    """The model's width, as a fraction of VGG-16's, and the steps of a run."""

    width: float
    steps: int


FULL, QUICK = Sizes(0.5, 60), Sizes(0.375, 24)
LIMIT = 256  # images: enough to time a step


@dataclass(frozen=True)
class Phases:
    """One method: milliseconds per step, and how much of the gradient it sent."""

    method: str
    forward: float
    backward: float
    select: float
    communicate: float
    density: float

    @property
    def parts(self) -> list[float]:
        return [self.forward, self.backward, self.select, self.communicate]


def run(shelf: Shelf) -> Finding:
    sizes = QUICK if shelf.quick else FULL
    base = Settings(
        "vgg",
        dataset=dataset("vgg", "mnist"),
        width=sizes.width,
        limit=LIMIT,
        density=DENSITY,
        workers=WORKERS,
        batch=BATCH,
        steps=sizes.steps,
        eval_every=sizes.steps,
        save=False,
    )
    runs = shelf.compare(base, {name: name for name in (FEW if shelf.quick else SPARSIFIERS)})
    return judge([phases_of(each) for each in runs.values()], conditions_of(runs[EXDYNA]))


def phases_of(run: Run) -> Phases:
    """Medians over the steps that count."""
    steps = run.steps[SETTLED:]
    ms = {phase: median(line.seconds[phase] or 0.0 for line in steps) * 1e3 for phase in PHASES}
    if is_hook(run.settings["sparsifier"]):  # all that such a hook does itself is start sending
        ms |= {"select": 0.0, "communicate": ms["select"] + ms["communicate"]}
    return Phases(run.name, **ms, density=fmean(line.density for line in steps))


def conditions_of(run: Run) -> str:
    settings = run.settings
    return (
        f"Measured on CPU: {settings['workers']} real gloo processes on this machine, its loopback as the network. "
        f"VGG-16 of width {settings['width']:g}, {run.header['n']:,} parameters, on {settings['dataset']}; batch "
        f"{settings['batch']} a worker, density {settings['density']}, {len(run.steps)} steps, of which the first "
        f"{SETTLED} do not count; one seed."
    )


def judge(rows: Sequence[Phases], conditions: str) -> Finding:
    """The criteria, from the rows alone."""
    by = {row.method: row for row in rows}
    topk, exdyna = by[TOPK], by[EXDYNA]
    share = topk.select / (topk.select + topk.communicate)
    checks = [
        Check(
            "selection is the largest part of what Top-k adds to computing: more than half of select + communicate",
            f"{share:.0%}: {topk.select:.3g} ms of {topk.select + topk.communicate:.3g} ms",
            share > LARGEST,
        ),
        Check(
            f"Top-k selects at least {LONGER:g}x as long as ExDyna",
            f"{topk.select / exdyna.select:.3g}x: {topk.select:.3g} ms against {exdyna.select:.3g} ms",
            topk.select >= LONGER * exdyna.select,
        ),
    ]
    heads = ["method", *(f"{phase}, ms" for phase in PHASES), "together, ms", "density sent"]
    table = [
        [row.method, *(f"{part:.3g}" for part in row.parts), f"{sum(row.parts):.3g}", f"{row.density:.3g}"]
        for row in rows
    ]
    return Finding(
        checks,
        [_figure(rows)],
        [Grid("A step, measured on CPU", heads, table)],
        f"{conditions} {_reading(topk)}",
    )


def _figure(rows: Sequence[Phases]) -> Figure:
    ends = [float(place) for place in range(len(PHASES) + 1)]
    lines = [Line(row.method, ends, list(accumulate(row.parts, initial=0.0))) for row in rows]
    return Figure(
        "phases",
        "Where a step's time goes, measured on CPU",
        "phases that are done",
        "ms since the step began",
        lines,
        "A line climbs by what a phase takes: forward, backward, select, communicate. Accumulating and writing the "
        "update count as selecting.",
    )


def _reading(topk: Phases) -> str:
    words = (
        "Accumulating and writing the update count as selecting, for all; dense hides communication behind the "
        "backward pass. Phases are wall-clock: where there are fewer cores than processes they contain waiting for "
        "a core, and communicating contains waiting for the slowest worker. By the authors' logs, on 8 A100s, "
        "Top-k spends 212 of 275 ms selecting (VGG-16, d = 0.001; a dense step takes 59 ms): that is their figure "
        "on GPUs, it is neither measured nor judged here."
    )
    if topk.select <= topk.communicate:
        words += (
            f" Here Top-k's communication takes {topk.communicate:.3g} ms, more than the {topk.select:.3g} ms of "
            f"its selection, beside {topk.forward + topk.backward:.3g} ms of computing."
        )
    return words


EXPERIMENT = Experiment(
    id="breakdown",
    source=TOPK_ANALYSIS,
    claim="What Top-k saves in bytes it spends on selecting.",
    minutes=8,
    run=run,
)
