"""What each part of ExDyna contributes: without it, the metric that it serves gets worse."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from gradsieve.sparsifiers.hard_threshold import authors_rule
from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.summary import summarise
from studies.reproduce._registry import (
    DENSITY,
    off,
    ratios,
    steps_of,
    training,
    words_on_data,
)
from studies.reproduce.base import EXDYNA_PAPER, Check, Experiment, Figure, Finding, Grid, Line
from studies.reproduce.imbalance import SETTLED, stream_imbalance, stream_words
from studies.reproduce.shelf import Shelf

WHOLE, STILL, STATIC = "exdyna", "still_exdyna", "micro"
WORKERS = 8
SHARDS = {"alike": 0.0, "skewed by label": 1.0}
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)
BLOCKS, QUICK_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096), (64, 512, 4096)


@dataclass(frozen=True)
class Trained:
    """One training run, or the mean of several."""

    total_error: float
    residual_norm: float  # at the end
    metric: float
    density_off: float  # mean distance from the target, as a share of it
    imbalance: float  # after the first 50 steps


@dataclass(frozen=True)
class Measured:
    """`rotation` by shards and method; `parts` by method; imbalance on skewed layers by method and by blocks."""

    rotation: Mapping[tuple[str, str], Trained]
    parts: Mapping[str, Trained]
    static: Mapping[str, float]
    blocks: Mapping[int, float]
    fixed: str  # the method with a fixed threshold
    conditions: str


def measure(shelf: Shelf) -> Measured:
    steps, seeds = steps_of(shelf.quick), QUICK_SEEDS if shelf.quick else SEEDS
    rotation = {
        (shards, method): _mean(
            [shelf.train(training(WORKERS, steps, seed=seed, skew=skew), method) for seed in seeds]
        )
        for shards, skew in SHARDS.items()
        for method in (WHOLE, STILL)
    }
    base = training(WORKERS, steps)
    whole = shelf.train(base, WHOLE)
    fixed = f"fixed_exdyna:threshold={authors_rule(whole.steps[0].k):.6g}"
    parts = {method: _mean([shelf.train(base, method)]) for method in (WHOLE, STATIC, fixed)}
    counts = QUICK_BLOCKS if shelf.quick else BLOCKS
    return Measured(
        rotation,
        parts,
        {method: _late(stream_imbalance(shelf, method, WORKERS)) for method in (WHOLE, STATIC)},
        {count: _late(stream_imbalance(shelf, f"exdyna:blocks={count}", WORKERS)) for count in counts},
        fixed,
        f"Training: {words_on_data(whole)}, {WORKERS} virtual workers, density {DENSITY:g}, {steps} steps; "
        f"rotation with {len(seeds)} seed{'s' if len(seeds) > 1 else ''}, all else with one. "
        f"Skewed layers: {stream_words(shelf)}.",
    )


def _late(values: Sequence[float]) -> float:
    return fmean(values[SETTLED:])


def _mean(runs: Sequence[Run]) -> Trained:
    found = [summarise(run) for run in runs]
    return Trained(
        fmean(each.total_error or 0.0 for each in found),
        fmean(each.residual_norm_last or 0.0 for each in found),
        fmean(each.metric_last or 0.0 for each in found),
        fmean(off(ratios(run)) for run in runs),
        fmean(_late([line.imbalance for line in run.steps]) for run in runs),
    )


def judge(found: Measured) -> Finding:
    """One check per part that was removed."""
    errors = {
        shards: (found.rotation[shards, STILL].total_error, found.rotation[shards, WHOLE].total_error)
        for shards in dict.fromkeys(shards for shards, _ in found.rotation)
    }
    fewest, most = min(found.blocks), max(found.blocks)
    whole, fixed = found.parts[WHOLE], found.parts[found.fixed]
    checks = [
        Check(
            f"no rotation, shards {shards}: the total error is larger",
            f"{without:.4g} against {with_it:.4g} ({without / with_it:.3f}x)",
            without > with_it,
        )
        for shards, (without, with_it) in errors.items()
    ]
    checks += [
        Check(
            f"static partitions: more imbalance on skewed layers after {SETTLED} steps",
            f"{found.static[STATIC]:.3f} against {found.static[WHOLE]:.3f}",
            found.static[STATIC] > found.static[WHOLE],
        ),
        Check(
            "fixed threshold (the authors' first one, 1 / (2 sqrt(k))): the density is farther from the target",
            f"off by {fixed.density_off:.1%} against {whole.density_off:.1%} on average over the steps",
            fixed.density_off > whole.density_off,
        ),
        Check(
            f"{fewest} blocks: more imbalance on skewed layers after {SETTLED} steps than {most:,}",
            f"{found.blocks[fewest]:.3f} against {found.blocks[most]:.3f}",
            found.blocks[fewest] > found.blocks[most],
        ),
    ]
    line = Line("exdyna", list(map(float, found.blocks)), list(found.blocks.values()))
    figure = Figure(
        "blocks",
        f"Imbalance on skewed layers against the number of blocks, {WORKERS} workers",
        "blocks",
        f"f(t), mean after {SETTLED} steps",
        [line],
        log_x=True,
    )
    rows = [_row(f"{method}, shards {shards}", each) for (shards, method), each in found.rotation.items()] + [
        _row(f"{method}, one seed", each) for method, each in found.parts.items()
    ]
    heads = ["run", "total error", "residual norm, last", "metric", "density off by", f"f(t) after {SETTLED} steps"]
    accuracies = "; ".join(
        f"shards {shards}: {found.rotation[shards, STILL].metric:.3f} against "
        f"{found.rotation[shards, WHOLE].metric:.3f}"
        for shards in errors
    )
    note = (
        f"{found.conditions} Total error is the sum over the steps of the workers' mean squared residual norm: "
        "rotation is there so that whoever has large elements comes to select among them. The metric "
        f"without and with rotation, {accuracies}."
    )
    note += "".join(
        f" With shards {shards} it did not help the total error: whose accumulator decides seems to matter less "
        "there than chance."
        for shards, (without, with_it) in errors.items()
        if without <= with_it
    )
    return Finding(checks, [figure], [Grid("Trainings", heads, rows)], note)


def _row(name: str, each: Trained) -> list[str]:
    return [
        name,
        f"{each.total_error:.4g}",
        f"{each.residual_norm:.4g}",
        f"{each.metric:.3f}",
        f"{each.density_off:.1%}",
        f"{each.imbalance:.3f}",
    ]


def run(shelf: Shelf) -> Finding:
    return judge(measure(shelf))


EXPERIMENT = Experiment(
    id="ablation",
    source=EXDYNA_PAPER,
    claim="Rotation, moving partitions, the scaled threshold and fine blocks each serve a metric of their own.",
    minutes=5,
    run=run,
)
