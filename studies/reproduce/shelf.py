"""The cache of what experiments measured.

Nothing is measured twice: an interrupted experiment resumes, and several may share a run.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsieve._check import BadInput
from gradsieve_lab._files import write_whole
from gradsieve_lab.runs import running
from gradsieve_lab.runs.comparing import slug
from gradsieve_lab.runs.methods import parse_method
from gradsieve_lab.runs.records import Run, read_run
from gradsieve_lab.runs.running import Listen, Stop
from gradsieve_lab.runs.settings import Settings


class Interrupted(Exception):
    """Stopped by the user; finished runs are on the shelf."""


@dataclass
class Shelf:
    """A folder with one record per run and one JSON file per measurement. `quick` asks for less of everything."""

    folder: Path
    quick: bool
    listen: Listen
    stop: Stop

    def run(self, settings: Settings) -> Run:
        """The run with these settings: read if finished, else made."""
        place = self.folder / "runs" / _name(settings)
        if place.is_dir():
            done = read_run(place)
            if done.end and done.end["reason"] == "finished":
                return done
            shutil.rmtree(place)
        self.check()
        made = running.run(settings, place, self.listen, self.stop)
        self.check()
        assert made is not None
        return made

    def compare(self, settings: Settings, methods: dict[str, str]) -> dict[str, Run]:
        """One run per method, at the settings' density; `methods` maps labels to what `parse_method` reads."""
        return {label: self.train(settings, text) for label, text in methods.items()}

    def train(self, settings: Settings, method: str) -> Run:
        """The run of a method as `parse_method` reads it, at the density of the settings."""
        return self.run(settings.with_method(parse_method(method, settings.density)))

    def measure(self, name: str, make: Callable[[], Any]) -> Any:
        """The result of `make` as JSON: read if it exists, else made and saved."""
        place = self.folder / "measured" / f"{name}{'-quick' if self.quick else ''}.json"
        if place.exists():
            return json.loads(place.read_text())
        self.check()
        text = json.dumps(make())
        self.check()
        write_whole(place, text + "\n")
        return json.loads(text)

    def check(self) -> None:
        if self.stop.requested():
            raise Interrupted


def dataset(task: str, wanted: str) -> str:
    """The real data set if GRADSIEVE_DATA has it, else the embedded one."""
    try:
        Settings(task, dataset=wanted).make_task()
    except BadInput:
        return ""
    return wanted


def _name(settings: Settings) -> str:
    """A readable folder name, unique to these settings."""
    text = json.dumps(settings.as_dict(), sort_keys=True)
    parts = (settings.task, settings.dataset, settings.label or settings.sparsifier, f"p{settings.workers}")
    words = [part for part in (*parts, f"s{settings.seed}") if part]
    return f"{slug('-'.join(words))}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
