"""Does the density hold at every step, and what does a budget buy? On several tasks, beside other methods.

Steady and budget run with 4, 8 and 16 workers at two densities; the other methods in one of these cells only, the
case's own, some with the first seed only. There all but dense send as many bytes as steady, or as many elements if
they need no histograms.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean, median

from gradsieve import ops
from gradsieve._check import one_of
from gradsieve_lab.runs.methods import DENSE, parse_method
from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.settings import Settings
from gradsieve_lab.runs.summary import summarise
from gradsieve_lab.tasks.base import Metric
from studies.reproduce._equal_bits import search
from studies.reproduce._scores import Scale, gain, score
from studies.reproduce.base import OURS, Check, Experiment, Figure, Finding, Grid, Line
from studies.reproduce.shelf import Shelf, dataset

STEADY, BUDGET, CONSTANT, BF16, FP8, ORACLE, RELEASE, TOPK = (
    "steady",
    "budget",
    "constant",
    "bf16",
    "fp8",
    "oracle",
    "release",
    "topk",
)
METHODS = {  # label -> what it is
    STEADY: "exdyna",
    BUDGET: "exdyna:spend=budget",
    CONSTANT: "fixed_exdyna:threshold={}",
    BF16: "exdyna:values=bf16",
    FP8: "exdyna:values=fp8",
    "micro": "micro",
    "cltk": "cltk",
    TOPK: "topk:aggregation=own",
    RELEASE: "released_exdyna",
    ORACLE: "oracle",
    DENSE: DENSE,
}
# For the same bytes: those of an element with float32 values, over those with these (`gradsieve bench wire`).
MORE_ELEMENTS = {BF16: 7.22 / 4.22, FP8: 7.22 / 2.72}
TOLERANCE, CLOSE = 0.02, 0.05
CNN_GAIN, CLOSED = 0.65, 1 / 3
WORKERS, DENSITIES = (4, 8, 16), (0.001, 0.01)


@dataclass(frozen=True)
class Case:
    """One task, and the cell in which all methods are compared."""

    task: str
    dataset: str
    density: float
    workers: int = 8
    grid: tuple[tuple[int, float], ...] = tuple((p, d) for p in WORKERS for d in DENSITIES)
    methods: tuple[str, ...] = tuple(METHODS)
    width: float = 1.0
    batch: int = 0
    seeds: int = 12  # of steady and budget, whose metrics differ less than two seeds do
    evaluations: int = 8
    late: int = 1  # evaluations at the end that count


LEADING = (STEADY, BUDGET, BF16, FP8, ORACLE)
FEW = 3  # seeds of these, of dense, and of the constant threshold
SMALL = tuple(method for method in METHODS if method != RELEASE)  # too small for the released blocks
CASES = {
    "cnn": Case("cnn", "mnist", 0.001, evaluations=1),
    "mlp": Case("mlp", "mnist", 0.001),
    "ncf": Case("ncf", "", 0.001),
    # With one sample a step, f - f* jumps from step to step.
    "madelon": Case("logreg", "madelon", 0.01, methods=SMALL, evaluations=20, late=5),
    "w8a": Case("logreg", "w8a", 0.01, methods=SMALL, evaluations=20, late=5),
    "lstm": Case("lstm", "tiny_shakespeare", 0.001, 4, methods=LEADING, seeds=3, evaluations=1),
    "wikitext": Case("lstm", "wikitext-2", 0.001, 4, (), LEADING, width=0.05, batch=2, seeds=3, evaluations=1),
}
SLOW = ("cnn", "lstm", "wikitext")  # minutes each, even with few steps: in a quick run only if named
FULL, QUICK = (480, range(12)), (60, range(1))  # steps and seeds


@dataclass(frozen=True)
class Row:
    """One method in one cell of one case, the mean over the seeds."""

    case: str
    workers: int
    density: float
    method: str
    metric: Metric
    scores: tuple[float, ...]  # by seed
    losses: tuple[float, ...]  # by seed, of the last tenth of the steps; infinite if training diverged
    total_errors: tuple[float, ...]  # by seed; infinite if training diverged
    sent: float  # elements, of those that the density asks for
    worst_sent: float  # the seed that is farthest from 1
    within_5pct: float  # of the steps after the first, in the worst seed
    most: float  # elements in one step, of those asked for
    bytes_per_step: float
    imbalance: float


def run(shelf: Shelf, only: Sequence[str] = ()) -> Finding:
    usual = [name for name in CASES if not (shelf.quick and name in SLOW)]
    rows: list[Row] = []
    curves: dict[str, Run] = {}
    for name in [one_of("case", name, CASES) for name in only] or usual:
        case, (_, seeds) = CASES[name], QUICK if shelf.quick else FULL
        found: dict[tuple[int, float, str], list[Run]] = {}
        for seed in seeds:
            for workers, density, method in cells(case, shelf.quick):
                if seed >= _seeds(case, workers, density, method):
                    continue
                made = _one(shelf, case, workers, density, method, seed, found)
                found.setdefault((workers, density, method), []).append(made)
        rows += [_row(case, name, *cell, runs) for cell, runs in found.items()]
        for method in (STEADY, BUDGET, RELEASE):
            if (case.workers, case.density, method) in found:
                curves[f"{name} {method}"] = found[case.workers, case.density, method][0]
    return Finding(judge(rows), _figures(rows, curves), [_table(rows)], _note(shelf))


def cells(case: Case, quick: bool) -> Iterable[tuple[int, float, str]]:
    """Workers, density and method of every run of a seed."""
    for method in case.methods:
        yield case.workers, case.density, method
    for workers, density in () if quick else case.grid:
        if (workers, density) != (case.workers, case.density):
            for method in (STEADY, BUDGET):
                yield workers, density, method


def _seeds(case: Case, workers: int, density: float, method: str) -> int:
    """The number of seeds: more for what is judged."""
    if (workers, density) != (case.workers, case.density):
        return 1
    if method in (STEADY, BUDGET):
        return case.seeds
    return min(FEW, case.seeds) if method in (*LEADING, CONSTANT, DENSE) else 1


def settings(shelf: Shelf, case: Case, workers: int, density: float, method: str, seed: int) -> Settings:
    steps, _ = QUICK if shelf.quick else FULL
    base = Settings(
        case.task,
        dataset=dataset(case.task, case.dataset),
        workers=workers,
        virtual=True,
        steps=steps,
        seed=seed,
        width=case.width,
        batch=case.batch,
        eval_every=steps // case.evaluations,
        save=False,
    )
    # Narrow values fit more elements into the same bytes; with Top-k's own picks, every worker sends that many.
    more = {METHODS[name]: times for name, times in MORE_ELEMENTS.items()}
    density *= {**more, METHODS[TOPK]: 1 / workers}.get(method, 1)
    return base.with_method(parse_method(method, density))


def _one(
    shelf: Shelf,
    case: Case,
    workers: int,
    density: float,
    method: str,
    seed: int,
    found: dict[tuple[int, float, str], list[Run]],
) -> Run:
    if method != CONSTANT:
        return shelf.run(settings(shelf, case, workers, density, METHODS[method], seed))
    return _tuned(shelf, case, workers, density, seed, found[workers, density, STEADY][-1])


def _tuned(shelf: Shelf, case: Case, workers: int, density: float, seed: int, steady: Run) -> Run:
    """The constant threshold that sends as much as steady: the choice of someone who knew the run beforehand."""

    def run(threshold: float) -> Run:
        edge = ops.bin_edge(ops.bin_of(threshold))  # rounded, so that no run is repeated
        return shelf.run(settings(shelf, case, workers, density, METHODS[CONSTANT].format(edge), seed))

    first = median(line.threshold for line in steady.steps if line.threshold)
    return run(search(lambda threshold: _sent(run(threshold)), _sent(steady), first, TOLERANCE).threshold)


def _sent(run: Run) -> int:
    return sum(line.selected for line in run.steps)


def _row(case: Case, name: str, workers: int, density: float, method: str, runs: list[Run]) -> Row:
    found = [summarise(each) for each in runs]
    asked = max(1, round(density * runs[0].header["n"]))
    union = [fmean(line.union for line in each.steps) / asked for each in runs]
    losses = [_late_loss(each) for each in runs]
    errors = [each.total_error or 0.0 for each in found]
    return Row(
        case=name,
        workers=workers,
        density=density,
        method=method,
        metric=runs[0].metric,
        scores=tuple(score(each, case.late) for each in runs),
        losses=tuple(losses),
        total_errors=tuple(error if loss < math.inf else loss for error, loss in zip(errors, losses, strict=True)),
        sent=fmean(union),
        worst_sent=max(union, key=lambda x: abs(x - 1)),
        within_5pct=min(fmean(abs((line.buildup or 1.0) - 1) <= CLOSE for line in each.steps[1:]) for each in runs),
        most=max(line.buildup or 1.0 for each in runs for line in each.steps),
        bytes_per_step=fmean(each.bytes_per_step for each in found),
        imbalance=fmean(each.imbalance_mean for each in found),
    )


def _late_loss(run: Run) -> float:
    late = [math.inf if line.loss is None else line.loss for line in run.steps[-len(run.steps) // 10 :]]
    return fmean(late)


def judge(rows: Sequence[Row]) -> list[Check]:
    """The criteria, from the rows alone."""
    budgets = {(row.case, row.workers, row.density): row for row in rows if row.method == BUDGET}
    pairs = [(row, budgets[row.case, row.workers, row.density]) for row in rows if row.method == STEADY]
    if not pairs:
        return []
    steady, budget = [one for one, _ in pairs], [other for _, other in pairs]
    # Training that diverged did not complete its steps: skipped ones do not count for the budget.
    whole = [row for row in budget if math.inf not in row.losses] or budget
    worst = max(whole, key=lambda row: abs(row.worst_sent - 1))
    checks = [
        Check(
            f"steady: every step after the first within {CLOSE:.0%} of the target, everywhere",
            f"{min(row.within_5pct for row in steady):.1%} of the steps, at most "
            f"{max(row.most for row in steady):.3f}x",
            all(row.within_5pct == 1 for row in steady),
        ),
        Check(
            f"budget: the total within {TOLERANCE:.0%}, wherever training did not diverge, with every seed",
            f"farthest {worst.worst_sent:.4f} ({_cell(worst)})",
            abs(worst.worst_sent - 1) <= TOLERANCE,
        ),
    ]
    for case in dict.fromkeys(row.case for row in steady):
        own = [(one, other) for one, other in pairs if one.case == case and math.isfinite(_ratio(one, other))]
        checks += _judge_case(own, CNN_GAIN if case == "cnn" else 1.0) if own else []
        checks += _judge_quality(case, [row for row in rows if row.case == case])
    return checks


def _judge_case(pairs: Sequence[tuple[Row, Row]], bound: float) -> list[Check]:
    """Budget against steady, where training did not diverge; the first pair is the case's own cell."""
    (steady, budget), ratios = pairs[0], [_ratio(one, other) for one, other in pairs]
    everywhere = f", {geometric_mean(ratios):.2f}x over {len(pairs)} cells" if len(pairs) > 1 else ""
    gained, error = gain(budget.scores, steady.scores)
    spread = "" if error is None else f" ± {error:.2g}"
    seeds = f"{n} seeds" if (n := len(budget.scores)) > 1 else "one seed"
    return [
        Check(
            f"{steady.case}: total error of budget at most {bound:g}x steady's",
            f"{ratios[0]:.2f}x{everywhere}",
            ratios[0] <= bound and geometric_mean(ratios) <= 1,
        ),
        Check(
            f"{steady.case}: {steady.metric.name} with budget not worse",
            f"{_mean(budget):.4g} against {_mean(steady):.4g}: {gained:+.2g}{spread} "
            f"{Scale(steady.metric).unit}, {seeds}",
            gained >= 0,
        ),
    ]


def _judge_quality(case: str, rows: Sequence[Row]) -> list[Check]:
    by = {row.method: row for row in reversed(rows)}
    if case not in ("mlp", "lstm", "wikitext") or not {STEADY, BF16, FP8, ORACLE} <= set(by):
        return []
    seeds = len(by[ORACLE].losses)
    near, far = fmean(by[STEADY].losses[:seeds]), fmean(by[ORACLE].losses)
    parts = {name: (near - fmean(by[name].losses)) / (near - far) if near > far else 0.0 for name in MORE_ELEMENTS}
    words = f"{case}: narrower values at equal bytes close a third of the way to the oracle (loss)"
    found = ", ".join(f"{name} {part:.0%}" for name, part in parts.items())
    return [Check(words, found, max(parts.values()) >= CLOSED)]


def _mean(row: Row) -> float:
    """The metric that corresponds to the mean score."""
    return Scale(row.metric).value(fmean(row.scores))


def _ratio(steady: Row, other: Row) -> float:
    """Ratio of total errors, over the seeds that both have; not finite if training diverged."""
    both = min(len(steady.total_errors), len(other.total_errors))
    base = fmean(steady.total_errors[:both])
    return fmean(other.total_errors[:both]) / base if 0 < base < math.inf else math.nan


def _shown(steady: Row, row: Row) -> str:
    """The ratio of total errors as the table has it."""
    if math.inf in row.total_errors:
        return "diverged"
    return "" if math.inf in steady.total_errors else f"{_ratio(steady, row):.2f}x"


def _cell(row: Row) -> str:
    return f"{row.case}, {row.workers} workers, density {row.density:g}"


def _table(rows: Sequence[Row]) -> Grid:
    steady = {(row.case, row.workers, row.density): row for row in rows if row.method == STEADY}
    heads = ["case", "workers", "density", "method", "seeds", "metric", "loss", "total error", "sent"]
    lines = [
        [
            row.case,
            str(row.workers),
            f"{row.density:g}",
            row.method,
            str(len(row.scores)),
            f"{row.metric.name} {_mean(row):.4g}",
            f"{fmean(row.losses):.4g}",
            _shown(steady[row.case, row.workers, row.density], row),
            f"{row.sent:.3f}x",
            f"{row.within_5pct:.0%}".replace("%", " %"),
            f"{row.bytes_per_step:,.0f}",
        ]
        for row in rows
    ]
    return Grid("Density and budgets", [*heads, "steps within 5 %", "bytes a step"], lines)


def _figures(rows: Sequence[Row], curves: dict[str, Run]) -> list[Figure]:
    lines = [
        Line(name, [line.step for line in each.steps], [line.buildup for line in each.steps])
        for name, each in curves.items()
    ]
    ratios: dict[str, dict[int, float]] = {}
    steady = {(row.case, row.workers, row.density): row for row in rows if row.method == STEADY}
    for row in rows:
        one = steady[row.case, row.workers, row.density]
        if row.method == BUDGET and math.isfinite(_ratio(one, row)):
            ratios.setdefault(f"{row.case}, density {row.density:g}", {})[row.workers] = _ratio(one, row)
    against = [
        Line(name, sorted(found), [found[workers] for workers in sorted(found)]) for name, found in ratios.items()
    ]
    return [
        Figure("density", "realised density", "step", "sent, of what was asked for", lines, log_y=True),
        Figure("error", "total error of budget", "workers", "of steady's", against, "Below 1, budget is better."),
    ]


def _note(shelf: Shelf) -> str:
    steps, seeds = QUICK if shelf.quick else FULL
    many = f"up to {len(seeds)} seeds" if len(seeds) > 1 else "one seed"
    return (
        f"Virtual workers, {steps} steps, {many}. The constant threshold is tuned in repeated runs until it sends "
        "as much as steady. Perplexities and f - f* are geometric means, f - f* over the last quarter of a run."
    )


EXPERIMENT = Experiment(
    id="density-control",
    source=OURS,
    claim="Steady density holds at every step, and a budget leaves a smaller total error for the same bytes.",
    minutes=180,
    run=run,
)
