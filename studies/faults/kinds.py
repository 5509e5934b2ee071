"""All kinds of trials, and one trial in a process of its own."""

import random
import shutil
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch

from studies.faults import commands, disks, trials
from studies.faults.results import CALM, Result, Trial
from studies.faults.worker import MODES

KINDS: dict[str, tuple[Trial, int]] = {  # each with its number of trials in a thousand
    "kill a worker": (trials.worker_trial("kill"), 140),
    "term a worker": (trials.worker_trial("term"), 80),
    "stop a worker": (trials.worker_trial("stop"), 100),
    "raise a worker": (trials.worker_trial("raise"), 80),
    "disk full": (disks.full_disk, 110),
    "read-only folder": (disks.read_only, 40),
    "damaged files": (disks.damaged, 200),
    "swapped ranks": (disks.swapped, 40),
    "two runs in one folder": (disks.two_runs, 40),
    "a link fails": (trials.link_trial, 60),
    "train": (commands.command_trial, 90),
    "two resume one run": (commands.two_commands, 8),
    "torchrun": (commands.torchrun_trial, 12),
}
NEED_ROOT = ("disk full", "read-only folder", "a link fails")
QUICK = ("kill a worker", "term a worker", "stop a worker", "raise a worker", "disk full", "damaged files")
_OF_WORKERS = ("kill a worker", "term a worker", "stop a worker", "raise a worker", "a link fails")
_OF_COMMANDS = ("train", "two resume one run", "torchrun")


def calm_runs(names: list[str]) -> dict[str, Any]:
    """The undisturbed runs with which trials of these kinds are compared."""
    runs: dict[str, Any] = {}
    if set(names) & set(_OF_WORKERS):
        runs |= {mode: partial(trials.calm, mode) for mode in MODES}
    if set(names) & set(_OF_COMMANDS):
        runs |= {method: partial(commands.calm, method) for method in commands.METHODS}
    return runs


def run_calm(line: Any, run: Any, folder: Path) -> None:
    """Process body of one undisturbed run."""
    torch.set_num_threads(1)
    line.send(run(folder))


def run_trial(line: Any, name: str, seed: float, folder: Path, calm: dict[str, Any]) -> None:
    """Process body of one trial."""
    torch.set_num_threads(1)
    CALM.update(calm)
    try:
        result = KINDS[name][0](random.Random(seed), folder)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        words = (
            f"the trial itself failed: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        )
        result = Result(name, False, words)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    line.send(result)


def schedule(names: list[str], trials: int, chance: random.Random) -> list[tuple[str, float]]:
    """A list of trials in random order, each with its seed; kinds occur in proportion to their weights."""
    total = sum(KINDS[name][1] for name in names)
    wanted = {name: trials * KINDS[name][1] / total for name in names}
    counts = {name: int(wanted[name]) for name in names}
    for name in sorted(names, key=lambda name: counts[name] - wanted[name])[: trials - sum(counts.values())]:
        counts[name] += 1
    order = [name for name in names for _ in range(counts[name])]
    chance.shuffle(order)
    return [(name, chance.random()) for name in order]
