"""Does the density hold at every step, and what does a budget buy? On several tasks, beside other methods.

Every run is recorded in a folder of its own, and one that is already there is not run again: an interrupted
experiment goes on where it was.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from gradsieve._check import BadInput, one_of
from gradsieve.experiments.comparing import slug
from gradsieve.experiments.methods import parse_method
from gradsieve.experiments.records import Run, read_run
from gradsieve.experiments.running import Listen, Stop, run
from gradsieve.experiments.settings import Settings
from gradsieve.experiments.summary import summarise

STEADY, BUDGET, BF16, ORACLE, RELEASE, TOPK = "steady", "budget", "bf16", "oracle", "release", "topk"
METHODS = {  # label -> what it is; all send about as many bytes: see `_density`
    STEADY: "exdyna",
    BUDGET: "exdyna:spend=budget",
    BF16: "exdyna:values=bf16",
    "micro": "micro",
    "cltk": "cltk",
    TOPK: "topk:aggregation=own",
    RELEASE: "exdyna:compat=release",
    ORACLE: "oracle",
}
MORE_ELEMENTS = 7.22 / 4.22  # bytes of an element with float32 and with bfloat16 values: `gradsieve bench wire`
TOLERANCE, CLOSE = 0.02, 0.05
CNN_GAIN, CLOSED = 0.65, 1 / 3


@dataclass(frozen=True)
class Case:
    """One task at one density; embedded data take the place of the data set where that is not at hand."""

    task: str
    dataset: str
    density: float
    methods: tuple[str, ...] = tuple(METHODS)
    workers: int = 8
    repeated: tuple[str, ...] = (STEADY, BUDGET)  # with every seed; the others with the first one only


CASES = {
    "cnn": Case("cnn", "mnist", 0.001, (STEADY, BUDGET, BF16)),
    "mlp": Case("mlp", "mnist", 0.001, repeated=(STEADY, BUDGET, BF16, ORACLE)),
    "mlp-16": Case("mlp", "mnist", 0.01, (STEADY, BUDGET), 16, repeated=()),
    "ncf": Case("ncf", "", 0.001),
    "madelon": Case("logreg", "madelon", 0.01, tuple(m for m in METHODS if m != RELEASE)),  # too small for it
    "w8a": Case("logreg", "w8a", 0.01, (STEADY, BUDGET, ORACLE), 4),
    "lstm": Case("lstm", "tiny_shakespeare", 0.001, (STEADY, BUDGET, BF16, ORACLE), 4, repeated=()),
}
SLOW = ("cnn", "lstm")  # minutes each, also with few steps: only by name where it must be quick
FULL, QUICK = (480, (0, 1, 2)), (60, (0,))  # steps and seeds


@dataclass(frozen=True)
class Row:
    """One method of one case, the mean over the seeds."""

    case: str
    method: str
    seeds: int
    metric_name: str
    metric: float
    loss: float  # of the last tenth of the steps
    total_error: float | None
    sent: float  # elements, of those that the density asks for
    worst_sent: float  # the seed that is farthest from 1
    within_5pct: float  # of the steps after the first, in the worst seed
    density_max: float  # of the target
    bytes_per_step: float
    imbalance: float


@dataclass(frozen=True)
class Claim:
    """What should hold, what was found, and whether it does."""

    claim: str
    found: str
    holds: bool


def plan(only: Sequence[str], quick: bool) -> list[tuple[str, str, Settings]]:
    """Case, method and settings of every run."""
    steps, seeds = QUICK if quick else FULL
    usual = [name for name in CASES if not (quick and name in SLOW)]
    found = []
    for name in [one_of("case", name, CASES) for name in only] or usual:
        case = CASES[name]
        for seed in seeds:
            for label in case.methods if seed == seeds[0] else case.repeated:
                method = parse_method(METHODS[label], _density(case, label))
                base = Settings(
                    case.task,
                    dataset=_dataset(case),
                    workers=case.workers,
                    virtual=True,
                    steps=steps,
                    seed=seed,
                    eval_every=steps // 8,
                    save=False,
                )
                found.append((name, label, base.with_method(method)))
    return found


def _density(case: Case, label: str) -> float:
    """bf16 gets more elements for its bytes; of Top-k's own picks, every worker sends that many."""
    return case.density * {BF16: MORE_ELEMENTS, TOPK: 1 / case.workers}.get(label, 1)


def _dataset(case: Case) -> str:
    """The real one where GRADSIEVE_DATA has it, or else the embedded one."""
    try:
        Settings(case.task, dataset=case.dataset).make_task()
    except BadInput:
        return ""
    return case.dataset


def collect(
    only: Sequence[str], quick: bool, folder: Path, listen: Listen, stop: Stop
) -> dict[tuple[str, str], list[Run]]:
    """Run what is not there yet; returns the runs of each case and method."""
    runs: dict[tuple[str, str], list[Run]] = {}
    for case, label, settings in plan(only, quick):
        place = folder / f"{case}-{slug(label)}-{settings.seed}"
        done = read_run(place) if place.is_dir() else None
        if done is None or not done.end or done.end["reason"] != "finished":
            if stop.requested():
                break
            if done is not None:
                shutil.rmtree(place)
            done = run(settings, place, listen, stop)
        assert done is not None
        runs.setdefault((case, label), []).append(done)
    return runs


def rows_of(runs: dict[tuple[str, str], list[Run]]) -> list[Row]:
    return [_row(case, label, found) for (case, label), found in runs.items()]


def _row(case: str, label: str, runs: list[Run]) -> Row:
    found = [summarise(each) for each in runs]
    late = [line["loss"] for each in runs for line in each.steps[-len(each.steps) // 10 :]]
    sent = [each.density_mean / each.density_target for each in found]
    errors = [each.total_error for each in found if each.total_error is not None]
    return Row(
        case=case,
        method=label,
        seeds=len(found),
        metric_name=found[0].metric_name,
        metric=fmean(each.metric_last or 0.0 for each in found),
        loss=fmean(late),
        total_error=fmean(errors) if errors else None,
        sent=fmean(sent),
        worst_sent=max(sent, key=lambda x: abs(x - 1)),
        within_5pct=min(_within(each) for each in runs),
        density_max=max(each.density_max / each.density_target for each in found),
        bytes_per_step=fmean(each.bytes_per_step for each in found),
        imbalance=fmean(each.imbalance_mean for each in found),
    )


def _within(run: Run) -> float:
    target = run.settings["density"]
    return fmean(abs(line["density"] / target - 1) <= CLOSE for line in run.steps[1:])


def judge(rows: Sequence[Row]) -> list[Claim]:
    """The criteria, from the rows alone."""
    by = {(row.case, row.method): row for row in rows}
    cases = [case for case, method in by if method == STEADY and (case, BUDGET) in by]
    if not cases:
        return []
    steady = [by[case, STEADY] for case in cases]
    budget = [by[case, BUDGET] for case in cases]
    worst = max(budget, key=lambda row: abs(row.worst_sent - 1))
    claims = [
        Claim(
            f"steady: every step after the first within {CLOSE:.0%} of the target, in every case",
            f"{min(row.within_5pct for row in steady):.1%} of the steps, at most "
            f"{max(row.density_max for row in steady):.3f}x",
            all(row.within_5pct == 1 for row in steady),
        ),
        Claim(
            f"budget: the total within {TOLERANCE:.0%}, in every case and seed",
            f"farthest {worst.worst_sent:.4f} ({worst.case})",
            abs(worst.worst_sent - 1) <= TOLERANCE,
        ),
    ]
    for case in cases:
        ratio = (by[case, BUDGET].total_error or 0.0) / (by[case, STEADY].total_error or 1.0)
        bound = CNN_GAIN if case == "cnn" else 1.0
        claims.append(
            Claim(f"{case}: total error of budget at most {bound:g}x steady's", f"{ratio:.2f}x", ratio <= bound)
        )
    for case in ("mlp", "lstm"):
        if {(case, STEADY), (case, BF16), (case, ORACLE)} <= set(by):
            near, far = by[case, STEADY].loss, by[case, ORACLE].loss
            part = (near - by[case, BF16].loss) / (near - far) if near > far else 0.0
            claims.append(
                Claim(
                    f"{case}: bf16 values at equal bytes close a third of the way to the oracle (loss)",
                    f"{part:.0%}",
                    part >= CLOSED,
                )
            )
    return claims
