"""Do all workers select about as much? Partitions that follow the load, compared with static ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from studies.reproduce._registry import steps_of, training, words_on_data
from studies.reproduce._streams import (
    HOTTER,
    LAYERS,
    Stream,
    imbalance_by_chance,
    imbalances,
    play,
)
from studies.reproduce.base import EXDYNA_PAPER, Check, Experiment, Figure, Finding, Grid, thinned
from studies.reproduce.shelf import Shelf

OURS, STATIC = "exdyna", "micro"
METHODS = (OURS, STATIC)
WORKERS = (4, 8, 16)
ELEMENTS, DENSITY = 1_600_000, 0.01
FULL, QUICK = 200, 70  # steps of a stream
SETTLED, BALANCED = 50, 1.1
TRAINED, TRAINED_DENSITIES = 8, (0.001, 0.01)  # workers, and what they send


@dataclass(frozen=True)
class Measured:
    """f(t) of every method: on skewed streams by the number of workers, in training by the density."""

    streams: Mapping[tuple[str, int], Sequence[float]]
    trainings: Mapping[tuple[str, float], Sequence[float]]
    chance: Mapping[int, float]  # by the number of workers
    conditions: str


def stream_imbalance(shelf: Shelf, method: str, workers: int) -> list[float]:
    """f(t) on skewed layers; shared by the experiments that need it."""
    steps = QUICK if shelf.quick else FULL
    name = "-".join(["skewed", *method.replace("=", "-").split(":"), f"p{workers}", f"n{ELEMENTS}", f"t{steps}"])
    stream = Stream(ELEMENTS, workers, skewed=True)
    found: list[float] = shelf.measure(
        name, lambda: imbalances(play(stream, method, DENSITY, steps, before_step=shelf.check))
    )
    return found


def stream_words(shelf: Shelf) -> str:
    return (
        f"generated gradients of {ELEMENTS:,} elements in {LAYERS} equal layers, one of them {HOTTER:g} times "
        f"louder, density {DENSITY:g}, {QUICK if shelf.quick else FULL} steps"
    )


def measure(shelf: Shelf) -> Measured:
    streams = {(method, size): stream_imbalance(shelf, method, size) for size in WORKERS for method in METHODS}
    trainings, words, steps = {}, "", steps_of(shelf.quick)
    for density in TRAINED_DENSITIES:
        for method in METHODS:
            run = shelf.train(training(TRAINED, steps, density), method)
            trainings[method, density] = [line.imbalance for line in run.steps]
            words = words_on_data(run)
    return Measured(
        streams,
        trainings,
        {size: imbalance_by_chance(round(DENSITY * ELEMENTS), size) for size in WORKERS},
        f"Skewed layers: {stream_words(shelf)}. Training: {words}, {TRAINED} virtual workers, "
        f"{steps} steps. One seed each.",
    )


def judge(found: Measured) -> Finding:
    """f(t) = P * max / sum of the workers' counts; means are over the steps after the first 50."""
    sizes = sorted(found.chance)
    late = {case: values[SETTLED:] for case, values in found.streams.items()}
    means = {case: fmean(values) for case, values in late.items()}
    trained = {case: values[SETTLED:] for case, values in found.trainings.items()}
    densities = sorted({density for _, density in trained})
    checks = [
        Check(
            f"skewed layers, P = {size}: ExDyna below MiCRO on average after {SETTLED} steps",
            f"{means[OURS, size]:.3f} against {means[STATIC, size]:.3f}",
            means[OURS, size] < means[STATIC, size],
        )
        for size in sizes
    ]
    checks += [
        Check(
            f"training, density {density:g}: ExDyna below MiCRO on average after {SETTLED} steps",
            f"{ours:.3f} against {static:.3f}",
            ours < static,
        )
        for density in densities
        for ours, static in [(fmean(trained[OURS, density]), fmean(trained[STATIC, density]))]
    ]
    checks += [
        Check(
            f"skewed layers, P = {size}: ours below {BALANCED:g} on average after {SETTLED} steps",
            f"{means[OURS, size]:.3f}; {_below(values):.0%} of the steps, worst {max(values):.3f}",
            means[OURS, size] < BALANCED,
        )
        for size in sizes
        for values in [late[OURS, size]]
    ]
    rows = [
        _row(method, f"P = {size}, skewed", late[method, size], f"{found.chance[size]:.3f}")
        for size in sizes
        for method in METHODS
    ]
    rows += [
        _row(method, f"training, density {density:g}", values, "-") for (method, density), values in trained.items()
    ]
    heads = ["sparsifier", "on", "mean f", "worst", f"steps below {BALANCED:g}", "by chance"]
    figures = [
        _figure(f"skewed-{size}", f"Skewed layers, {size} workers", {m: found.streams[m, size] for m in METHODS})
        for size in sizes
    ]
    figures += [
        _figure(
            f"training-{density:g}",
            f"Training, {TRAINED} workers, density {density:g}",
            {method: found.trainings[method, density] for method in METHODS},
        )
        for density in densities
    ]
    chance = ", ".join(f"{value:.3f} (P = {size})" for size, value in found.chance.items())
    note = (
        f"{found.conditions} If each selected element fell to a worker by chance, all of them alike, f would be "
        f"{chance} on average: nothing that decides before it has seen the step can do better."
    )
    early = {case: fmean(values[:SETTLED]) for case, values in found.trainings.items()}
    for density in densities:
        if fmean(trained[OURS, density]) >= fmean(trained[STATIC, density]):
            note += (
                f" In the training at density {density:g} moving borders gain nothing after {SETTLED} steps; over "
                f"those before, the means are {early[OURS, density]:.3f} and {early[STATIC, density]:.3f}. Likely "
                "there is no lasting difference between parts of the vector left there, but changes from step to "
                "step, which borders drawn from earlier steps cannot foresee."
            )
    return Finding(checks, figures, [Grid(f"f(t) after {SETTLED} steps", heads, rows)], note)


def _figure(key: str, title: str, lines: Mapping[str, Sequence[float]]) -> Figure:
    return Figure(
        key,
        title,
        "step",
        "f(t) = P max / sum",
        [thinned(method, list(map(float, range(len(values)))), values) for method, values in lines.items()],
        "1: all workers select as much",
        log_y=True,
    )


def _row(method: str, on: str, values: Sequence[float], chance: str) -> list[str]:
    return [method, on, f"{fmean(values):.3f}", f"{max(values):.3f}", f"{_below(values):.0%}", chance]


def _below(values: Sequence[float]) -> float:
    return fmean(value < BALANCED for value in values)


def run(shelf: Shelf) -> Finding:
    return judge(measure(shelf))


EXPERIMENT = Experiment(
    id="imbalance",
    source=EXDYNA_PAPER,
    claim="Partitions that follow the work keep the workers' loads alike where static ones do not.",
    minutes=3,
    run=run,
)
