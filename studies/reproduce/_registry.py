"""Every sparsifier on one training task: the runs that several experiments share."""

from collections.abc import Sequence
from statistics import fmean

from gradsieve.sparsifiers import SPARSIFIERS
from gradsieve_lab.runs.methods import DENSE
from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.settings import Settings
from studies.reproduce.shelf import dataset
from studies.sparsifiers import STUDIED

TASK, DATASET, DENSITY = "mlp", "mnist", 0.001
RELEASE = "released_exdyna"
FULL, QUICK = 200, 60  # steps


def every_method() -> list[str]:
    """All sparsifiers of the library that select, the oracle, and ExDyna as released."""
    return [*(name for name in SPARSIFIERS if name != DENSE and name not in STUDIED), "oracle", RELEASE]


def steps_of(quick: bool) -> int:
    return QUICK if quick else FULL


def training(workers: int, steps: int, density: float = DENSITY, seed: int = 0, skew: float = 0.0) -> Settings:
    """Settings of one real training run, evaluated only before and after."""
    return Settings(
        TASK,
        dataset=dataset(TASK, DATASET),
        workers=workers,
        density=density,
        steps=steps,
        seed=seed,
        skew=skew,
        virtual=True,
        eval_every=steps,
        save=False,
    )


def ratios(run: Run) -> list[float]:
    """Realised density over the target, step by step."""
    return [line.union / line.k for line in run.steps]


def overlaps(run: Run) -> list[float]:
    """Union over the mean number of positions that a worker picked: 1 if all pick the same, P if none overlap.

    Steps in which nobody picked anything are left out.
    """
    workers = run.settings["workers"]
    return [line.union * workers / line.selected for line in run.steps if line.selected]


def off(values: Sequence[float]) -> float:
    """Mean distance from 1."""
    return fmean(abs(value - 1) for value in values)


def words_on_data(run: Run) -> str:
    """A description of the task, with the data set used."""
    settings = run.settings
    real = settings["dataset"] == DATASET
    return (
        f"{settings['task']} ({run.header['n']:,} parameters) on {settings['dataset']} "
        f"({'real' if real else 'embedded'} data)"
    )
