"""Does sparse training end where dense training ends, for far fewer bytes? Five tasks, against bytes and time.

Two claims about the same runs: the paper's, of gradients by ExDyna, and this library's, of weights by `share`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from gradsieve_lab.runs.comparing import with_equal_bytes
from gradsieve_lab.runs.gains import gain_kept
from gradsieve_lab.runs.methods import ALONE, AVERAGE, DENSE, SHARE, parse_method
from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.settings import Settings
from gradsieve_lab.tasks.base import Metric
from studies.reproduce.base import EXDYNA_PAPER, OURS, Check, Experiment, Figure, Finding, Grid, Line
from studies.reproduce.shelf import Shelf, dataset

EXDYNA = "exdyna"
DENSITY, WORKERS = 0.01, 4
METHODS = {  # `share` sends eight-bit values, and as many more of them as fit into the same bytes
    DENSE: "dense",
    EXDYNA: "exdyna",
    SHARE: f"share:values=fp8:density={2.7 * DENSITY}:noise=averaged",
    ALONE: "alone",
}
POINT = 0.01  # of an accuracy or a hit rate
FEWER = 10.0  # times
RATE = 100e6  # bits per second of the modelled link
EVALUATIONS = 8
LEARNED = 0.1  # fraction of the initial metric: if dense gained less, there is little to compare


@dataclass(frozen=True)
class Case:
    """One task: its real data set, the model's width, steps, and a worker's batch (0: the recipe's)."""

    task: str
    title: str
    dataset: str
    width: float
    steps: int
    batch: int = 8  # small, so that there are many steps


FULL = (
    Case("resnet", "ResNet-20", "mnist", 0.5, 4000),
    Case("vgg", "VGG-16", "mnist", 0.125, 4000),
    Case("lstm", "LSTM", "tiny_shakespeare", 0.5, 4000),
    Case("ncf", "NCF", "ml-100k", 1.0, 4000, batch=0),
    Case("bert", "BERT-style", "sst2", 0.5, 4000),
)
QUICK = (  # embedded data, as small as they are
    Case("resnet", "ResNet-20", "", 0.25, 80),
    Case("vgg", "VGG-16", "", 0.125, 80),
    Case("lstm", "LSTM", "", 0.25, 120),
    Case("ncf", "NCF", "", 1.0, 200, batch=0),
    Case("bert", "BERT-style", "", 0.25, 200, batch=16),
)


@dataclass(frozen=True)
class Claim:
    """The method compared with dense at the end; for a perplexity, one point is the fraction `part` of dense's."""

    method: str
    name: str
    part: float


PAPERS, OF_WEIGHTS = Claim(EXDYNA, "ExDyna", 0.01), Claim(SHARE, "share", 0.03)


@dataclass(frozen=True)
class Curve:
    """One method of one task: the metric, bytes per worker and modelled seconds at every evaluation."""

    method: str
    values: list[float | None]
    bytes: list[float]
    seconds: list[float]

    @property
    def last(self) -> float | None:
        """None if training diverged."""
        return self.values[-1]


@dataclass(frozen=True)
class Outcome:
    """All methods of one task."""

    title: str
    about: str
    metric: Metric
    times: dict[str, float]  # a parameter is sent on average, by method
    curves: dict[str, Curve]


def run(claim: Claim, shelf: Shelf) -> Finding:
    found = []
    for case in QUICK if shelf.quick else FULL:
        base = Settings(
            case.task,
            dataset=dataset(case.task, case.dataset),
            width=case.width,
            density=DENSITY,
            workers=WORKERS,
            virtual=True,
            batch=case.batch,
            steps=case.steps,
            eval_every=max(1, case.steps // EVALUATIONS),
            save=False,
        )
        runs = shelf.compare(base, METHODS)
        average = with_equal_bytes(parse_method(AVERAGE, DENSITY), [runs[SHARE]])
        runs[AVERAGE] = shelf.run(base.with_method(average))
        found.append(outcome_of(case.title, runs))
    return judge(found, claim)


def outcome_of(title: str, runs: dict[str, Run]) -> Outcome:
    first = runs[DENSE]
    settings = first.settings
    about = (
        f"{title}: {settings['dataset']}, {first.header['n']:,} parameters, {settings['steps']:,} steps, batch "
        f"{settings['batch']} per worker"
    )
    times = {name: sum(line.density for line in each.steps) for name, each in runs.items()}
    return Outcome(title, about, first.metric, times, {name: curve_of(name, each) for name, each in runs.items()})


def curve_of(name: str, run: Run) -> Curve:
    """Each step takes the run's median computing time, each worker on its own machine; then it sends."""
    step = median(line.seconds["step"] or 0.0 for line in run.steps)
    sent = [line["bytes"] for line in run.metrics]
    seconds = [line["step"] * step + 8 * bytes / RATE for line, bytes in zip(run.metrics, sent, strict=True)]
    return Curve(name, [line["value"] for line in run.metrics], sent, seconds)


def judge(outcomes: Sequence[Outcome], claim: Claim) -> Finding:
    """The criteria, from the curves alone."""
    fewer = {each.title: each.curves[DENSE].bytes[-1] / each.curves[claim.method].bytes[-1] for each in outcomes}
    least = min(fewer, key=lambda title: fewer[title])
    checks = [
        *(_check(each, claim) for each in outcomes),
        Check(
            f"{claim.name} sends at least {FEWER:g}x fewer bytes than dense, in every task",
            f"at least {fewer[least]:.3g}x fewer ({least})",
            fewer[least] >= FEWER,
        ),
    ]
    figures = [figure for each in outcomes for figure in _figures(each)]
    return Finding(checks, figures, [_table(outcomes)], _note(outcomes, claim))


def _check(outcome: Outcome, claim: Claim) -> Check:
    metric, dense, ours = outcome.metric, outcome.curves[DENSE].last, outcome.curves[claim.method].last
    most = "1 point (0.01) below" if metric.higher_is_better else f"{claim.part:.0%} above"
    criterion = f"{outcome.title}: {metric.name} of {claim.name} at the end at most {most} dense"
    if dense is None or ours is None:
        return Check(criterion, "training diverged", False)
    behind = lag(metric, dense, ours)
    amount = f"{behind * 100:+.2f} {'points' if metric.higher_is_better else '%'}"
    holds = behind <= (POINT if metric.higher_is_better else claim.part)
    return Check(criterion, f"{metric.show(ours)} against {metric.show(dense)}: behind by {amount}", holds)


def lag(metric: Metric, dense: float, ours: float) -> float:
    """How far ours is behind dense: in the metric itself, or for a perplexity as a fraction of dense's."""
    return dense - ours if metric.higher_is_better else ours / dense - 1


def _figures(outcome: Outcome) -> list[Figure]:
    curves, key = outcome.curves.values(), outcome.title.lower().split("-")[0]
    # A logarithmic axis cannot show points before the first byte.
    by_bytes = [Line(each.method, each.bytes[1:], each.values[1:]) for each in curves if each.bytes[1]]
    by_time = [Line(each.method, each.seconds, each.values) for each in curves]
    modelled = (
        f"Modelled: computing as measured on this CPU, then the bytes on a link of {RATE / 1e6:g} Mbit/s; not the "
        "time of a network that was used."
    )
    name = outcome.metric.name
    return [
        Figure(f"{key}-bytes", outcome.title, "bytes per worker", name, by_bytes, outcome.about, log_x=True),
        Figure(f"{key}-time", outcome.title, "seconds, modelled", name, by_time, modelled),
    ]


def _table(outcomes: Sequence[Outcome]) -> Grid:
    rows = []
    for outcome in outcomes:
        dense = outcome.curves[DENSE].bytes[-1]
        for each in outcome.curves.values():
            value = "diverged" if each.last is None else outcome.metric.show(each.last)
            sent = each.bytes[-1]
            size = [f"{sent / 1e6:.4g}", f"{dense / sent:.3g}x" if sent else "nothing sent"]
            rows.append([f"{outcome.title}, {each.method}", value, _gain(outcome, each), *size])
            rows[-1].append(f"{each.seconds[-1]:.3g}")
    heads = ["task, method", "metric", "gain kept", "MB per worker", "fewer", "seconds, modelled"]
    return Grid("At the end", heads, rows)


def _gain(outcome: Outcome, curve: Curve) -> str:
    value, alone, dense = (each.last for each in (curve, outcome.curves[ALONE], outcome.curves[DENSE]))
    if value is None or alone is None or dense is None:
        return "unknown"
    kept = gain_kept(value, alone, dense, outcome.metric)
    return "unknown" if kept is None else f"{kept:.0%}"


def _note(outcomes: Sequence[Outcome], claim: Claim) -> str:
    words = [
        f"{WORKERS} virtual workers, density {DENSITY}, one seed, learning rates that fall to zero, the recipes of "
        f"the tasks otherwise. {'. '.join(each.about for each in outcomes)}. A perplexity has no points: "
        f"{claim.part:.0%} of dense's stands for one. `share` has eight-bit values at 2.7 times that density, "
        "which takes ExDyna's bytes, and ReplicaAdamW where a recipe has AdamW; alone is one worker with the "
        "recipe's learning rate for its own batch, and average averages all weights as rarely as takes the bytes "
        "of share. Gain kept is (method - alone) / (dense - alone), of perplexities "
        f"with their logarithms. Time is modelled: {RATE / 1e6:g} Mbit/s for the bytes per worker, and computing "
        "as measured, one worker at a time."
    ]
    words += [_reason(each, claim) for each in outcomes if not _check(each, claim).holds]
    words += [_little(each) for each in outcomes]
    return " ".join(word for word in words if word)


def _reason(outcome: Outcome, claim: Claim) -> str:
    """Details of a run that is behind: does the gap still shrink, and how often were parameters sent?"""
    dense, ours = outcome.curves[DENSE].values, outcome.curves[claim.method].values
    lags = [lag(outcome.metric, d, o) for d, o in zip(dense, ours, strict=True) if d is not None and o is not None]
    if len(lags) < len(dense):
        return f"{outcome.title}: training diverged."
    unit = "" if outcome.metric.higher_is_better else " of dense's"
    middle = lags[len(lags) // 2]
    way = "it closes" if lags[-1] < middle else "it does not close"
    return (
        f"{outcome.title}: behind by {middle:.3g}{unit} at half of the run, by {lags[-1]:.3g} at its end: {way}. "
        f"A parameter was sent {outcome.times[claim.method]:.1f} times on average; in dense training in each step."
    )


def _little(outcome: Outcome) -> str:
    """A warning if dense learned so little that matching it means little."""
    first, last = outcome.curves[DENSE].values[0], outcome.curves[DENSE].last
    if first is None or last is None or abs(last - first) >= LEARNED * first:
        return ""
    return f"{outcome.title}: dense itself learned little in so few steps: to be as good says little."


EXPERIMENTS = (
    Experiment(
        id="accuracy",
        source=EXDYNA_PAPER,
        claim="ExDyna ends where dense training ends, for far fewer bytes.",
        minutes=100,
        run=partial(run, PAPERS),
    ),
    Experiment(
        id="weights",
        source=OURS,
        claim="share ends where dense training ends, with any optimizer, for far fewer bytes.",
        minutes=100,  # with the runs of accuracy there: none
        run=partial(run, OF_WEIGHTS),
    ),
)
