"""The outcome of an experiment and its conditions: one JSON file per id."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradsieve._check import BadInput
from gradsieve_lab._files import write_whole
from gradsieve_lab.conditions import conditions
from gradsieve_lab.runs.running import command_line
from studies.reproduce.base import Experiment, Finding
from studies.reproduce.shelf import Shelf


@dataclass(frozen=True)
class Outcome:
    """One experiment that was run."""

    id: str
    source: str
    claim: str
    quick: bool
    seconds: float  # of this run; runs from the shelf take none
    command: str
    conditions: dict[str, str]
    finding: Finding

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "finding": self.finding.as_dict()}


def carry_out(experiment: Experiment, shelf: Shelf) -> Outcome:
    """Run the experiment and save its findings."""
    started = time.perf_counter()
    finding = experiment.run(shelf)
    outcome = Outcome(
        experiment.id,
        experiment.source,
        experiment.claim,
        shelf.quick,
        round(time.perf_counter() - started, 1),
        command_line("python -m studies"),
        conditions(),
        finding,
    )
    write_whole(shelf.folder / f"{experiment.id}.json", json.dumps(outcome.as_dict(), allow_nan=False) + "\n")
    return outcome


def read_outcomes(folder: Path, ids: list[str]) -> list[Outcome]:
    """Existing outcomes of these ids, in this order."""
    return [_read(path) for name in ids if (path := folder / f"{name}.json").exists()]


def _read(path: Path) -> Outcome:
    try:
        stored = json.loads(path.read_text())
        return Outcome(**{**stored, "finding": Finding.from_dict(stored["finding"])})
    except (OSError, ValueError, TypeError, KeyError) as problem:
        raise BadInput(f"{path} must be an outcome of python -m studies, got {problem}") from problem
