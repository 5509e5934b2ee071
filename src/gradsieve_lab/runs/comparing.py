"""Compare methods on the same task, seed and data, one run after the other."""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gradsieve._check import BadInput
from gradsieve_lab.runs.methods import REPLICATED, Method, is_open, is_sparse
from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.running import Listen, Stop, run
from gradsieve_lab.runs.settings import Settings
from gradsieve_lab.runs.summary import dense_bytes, summarise


def check(settings: Settings, methods: Sequence[Method]) -> None:
    """Raise `ValueError` for a method that cannot run, before any run starts."""
    for method in methods:
        if not is_open(method):
            settings.with_method(method)
        elif not any(is_sparse(other.name) for other in methods):
            raise BadInput(
                "average takes as many bytes as a sparse method beside it, got none: "
                "name one, or write average:every=100"
            )


def compare(settings: Settings, methods: list[Method], folder: Path, listen: Listen, stop: Stop) -> list[Run]:
    """Run each method, in its own folder below `folder`; ends early when asked to stop.

    An average that is to send as many bytes as another run comes last.
    """
    runs: list[Run] = []
    for method in sorted(methods, key=is_open):
        if stop.requested():
            break
        if is_open(method):
            method = with_equal_bytes(method, runs)
            if any(method.label == done.name for done in runs):
                continue  # the same average was also named
        try:
            new = run(settings.with_method(method), folder / slug(method.label), listen, stop)
        except BaseException:
            with suppress(OSError):  # it is empty if the first run failed before its first step
                folder.rmdir()
            raise
        assert new is not None
        runs.append(new)
    return runs


def with_equal_bytes(method: Method, runs: Sequence[Run]) -> Method:
    """An average with as many bytes as the first run that shares weights, or else the first sparse one."""
    sparse = [run for run in runs if is_sparse(run.settings["sparsifier"])]
    reference = next((run for run in sparse if run.settings["sparsifier"] in REPLICATED), sparse[0])
    steps, whole = len(reference.steps), dense_bytes(reference)
    averages = round(summarise(reference).bytes_total / whole) if whole else steps  # including the one at the end
    every = math.ceil(steps / min(max(averages, 1), steps))
    return replace(method, options={"every": every}, label=f"{method.name} every={every}")


def slug(label: str) -> str:
    """
    >>> slug("cltk beta=0.1 density=0.05")
    'cltk-beta-0.1-density-0.05'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", label)
