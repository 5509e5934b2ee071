"""The same task, seed and data for several methods, one run after the other."""

import re
from contextlib import suppress
from pathlib import Path

from gradsieve.experiments.methods import Method
from gradsieve.experiments.records import Run
from gradsieve.experiments.running import Listen, Stop, run
from gradsieve.experiments.settings import Settings


def compare(settings: Settings, methods: list[Method], folder: Path, listen: Listen, stop: Stop) -> list[Run]:
    """One run a method, each in a folder of its own below `folder`; ends early when asked to stop."""
    runs: list[Run] = []
    for method in methods:
        if stop.requested():
            break
        try:
            done = run(settings.with_method(method), folder / slug(method.label), listen, stop)
        except BaseException:
            with suppress(OSError):  # if the first run never began, its folder is gone and this one empty
                folder.rmdir()
            raise
        assert done is not None
        runs.append(done)
    return runs


def slug(label: str) -> str:
    """
    >>> slug("cltk beta=0.1 density=0.05")
    'cltk-beta-0.1-density-0.05'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", label)
