"""Label-skewed shards: do they cost Top-k more than a hard threshold at equal bits?

Losses are in points of accuracy for a classifier, and in powers of ten of f - f* for logistic regression.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.settings import Settings
from studies.reproduce._equal_bits import EQUAL, equal_bits
from studies.reproduce._scores import Scale, score
from studies.reproduce.base import RETHINKING_PAPER, Check, Experiment, Figure, Finding, Grid, Line
from studies.reproduce.shelf import Shelf, dataset

DENSE, TOPK, HARD = "dense", "Top-k", "hard threshold"
EVEN, SKEWED = 0.0, 1.0  # `skew` of the shards: at 1 each has one label, or two
EVALUATIONS, LATE = 20, 5  # per run; how many at the end count
WORKERS = 10
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)


@dataclass(frozen=True)
class Result:
    """One method on one kind of shards: by seed, a score (higher is better) and the elements sent."""

    scores: list[float]
    sent: list[float]

    @property
    def score(self) -> float:
        return fmean(self.scores)


@dataclass(frozen=True)
class Measured:
    """One task."""

    name: str
    unit: str
    results: dict[tuple[str, float], Result]  # by method and skew

    def behind(self, label: str, skew: float = SKEWED) -> float:
        """How far a method ends behind dense training on the same shards."""
        return self.results[DENSE, skew].score - self.results[label, skew].score

    def cost(self, label: str) -> float:
        """What the skew costs a method beyond what it costs dense training."""
        return self.behind(label) - self.behind(label, EVEN)

    def bits(self) -> list[float]:
        """Hard threshold's bits over Top-k's, for every kind of shards and seed."""
        pairs = [(self.results[HARD, skew].sent, self.results[TOPK, skew].sent) for skew in (EVEN, SKEWED)]
        return [hard / topk for both in pairs for hard, topk in zip(*both, strict=True)]


def judge(found: Sequence[Measured], note: str) -> Finding:
    checks, rows = [], []
    for each in found:
        behind, cost = ([of(label) for label in (TOPK, HARD)] for of in (each.behind, each.cost))
        worst = max(each.bits(), key=lambda ratio: abs(ratio - 1))
        checks += [
            Check(
                f"{each.name}: on skewed shards Top-k ends farther behind dense than hard threshold",
                f"{behind[0]:.3g} against {behind[1]:.3g} {each.unit}",
                behind[0] > behind[1],
            ),
            Check(
                f"{each.name}: the skew costs Top-k more than hard threshold (beyond what dense loses)",
                f"{cost[0]:.3g} against {cost[1]:.3g} {each.unit}",
                cost[0] > cost[1],
            ),
            Check(
                f"{each.name}: as many bits in all, within {EQUAL:.0%}",
                f"hard threshold {worst:.3f}x Top-k at worst",
                abs(worst - 1) <= EQUAL,
            ),
        ]
        for label in (TOPK, HARD):
            ends = [f"{each.behind(label, skew):.3g}" for skew in (EVEN, SKEWED)]
            rows.append([f"{each.name}: {label}", *ends, f"{each.cost(label):.3g}", each.unit])
    figures = [
        Figure(
            f"hetero-{number}",
            each.name,
            "skew of the shards",
            f"behind dense, {each.unit}",
            [
                Line(label, [EVEN, SKEWED], [each.behind(label, s) for s in (EVEN, SKEWED)])
                for label in (TOPK, HARD)
            ],
        )
        for number, each in enumerate(found)
    ]
    heads = ["task and method", "behind dense, even shards", "skewed shards", "what the skew costs", "unit"]
    return Finding(checks, figures, [Grid("Label skew", heads, rows)], note)


def tasks(quick: bool) -> list[Settings]:
    """Logistic regression and a classifier, on real data if available."""
    common = Settings("mlp", workers=WORKERS, virtual=True, save=False)
    madelon, mnist = dataset("logreg", "madelon"), dataset("mlp", "mnist")
    shape: dict[str, Any] = {} if madelon else {"width": 0.1, "limit": 2000}  # as madelon: 2000 x 500
    logreg = replace(common, task="logreg", dataset=madelon, steps=150 if quick else 600, density=1 / 500, **shape)
    mlp = replace(common, dataset="" if quick else mnist, width=0.25, steps=80 if quick else 400, density=0.001)
    return [replace(each, eval_every=each.steps // EVALUATIONS) for each in (logreg, mlp)]


def measure(shelf: Shelf, settings: Settings) -> Measured:
    runs: dict[tuple[str, float], list[Run]] = {}
    for seed in QUICK_SEEDS if shelf.quick else SEEDS:
        for skew in (EVEN, SKEWED):
            here = replace(settings, skew=skew, seed=seed)
            for label, run in _compare(shelf, here).items():
                runs.setdefault((label, skew), []).append(run)
    any_run = runs[DENSE, EVEN][0]
    return Measured(
        name=f"{settings.task} on {any_run.settings['dataset']}",
        unit=Scale(any_run.metric).unit,
        results={
            key: Result([score(run, LATE) for run in each], [*map(_sent, each)]) for key, each in runs.items()
        },
    )


def _compare(shelf: Shelf, settings: Settings) -> dict[str, Run]:
    """Run the three methods; the threshold is tuned to Top-k's total for this run."""
    runs = shelf.compare(settings, {DENSE: "dense", TOPK: "topk:aggregation=own"})
    k = runs[TOPK].steps[0].k
    # A first guess, the size of what Top-k leaves unsent; others would only need more tries.
    first = (runs[TOPK].steps[-1].residual_norm or 1.0) / math.sqrt(runs[TOPK].header["n"])
    data = f"{settings.task}-{settings.dataset or 'embedded'}"
    name = f"hetero-{data}-t{settings.steps}-x{settings.skew:g}-s{settings.seed}"
    tuned = equal_bits(shelf, f"{name}-threshold", settings, k, first, enough=0.0)
    return runs | shelf.compare(settings, {HARD: f"hard_threshold:aggregation=own:threshold={tuned.threshold!r}"})


def _sent(run: Run) -> float:
    return float(sum(line.selected for line in run.steps))


def run(shelf: Shelf) -> Finding:
    found, lines = [], []
    for settings in tasks(shelf.quick):
        each = measure(shelf, settings)
        found.append(each)
        lines.append(f"{each.name}: density {settings.density:g}, {settings.steps} steps.")
    seeds = len(QUICK_SEEDS if shelf.quick else SEEDS)
    note = (
        f"{' '.join(lines)} {WORKERS} workers, {seeds} seed{'s' * (seeds > 1)}; skewed shards are sorted by label "
        "altogether. A score is the mean of a run's last evaluations. The threshold was tuned for every run, so "
        "that as many elements are sent as with Top-k."
    )
    return judge(found, note)


EXPERIMENT = Experiment(
    id="hetero",
    source=RETHINKING_PAPER,
    claim="When workers' data differ, Top-k loses more than a hard threshold that sends as much.",
    minutes=7,
    run=run,
)
