"""The result of a trial, and what all trials know about undisturbed runs."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SLACK_S = 15.0  # beyond the timeout, until all survivors have agreed on who is missing


@dataclass(frozen=True)
class Result:
    """One trial. `survived`: nothing was lost but interrupted steps, nobody hung, nothing half-written is left."""

    kind: str
    survived: bool
    what: str  # happened, or went wrong
    known_s: float | None = None  # until the last survivor knew
    lost_steps: int | None = None  # that had to be made again after the restart
    lost_norm: float | None = None  # of the residuals or drifts of dead workers, if the others went on


Trial = Callable[[random.Random, Path], Result]
CALM: dict[str, Any] = {}  # results of undisturbed runs, by method
