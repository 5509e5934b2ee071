"""docs/architecture.md is true: its paths exist, its table is complete, and its walks are those of the code."""

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from gradsieve import VirtualWorld, virtual_reducers
from helpers import ROOT, gradients
from virtual_replicas import Workers

TEXT = (ROOT / "docs" / "architecture.md").read_text()
CORE = ROOT / "src" / "gradsieve"
N, WORLD_SIZE, DENSITY = 20_000, 4, 0.01
STEPS = 12  # after these ExDyna has a level to look for
# Named in the walk of a step because they come before, after, or in real processes only.
AROUND = {"ddp/hook.py", "ddp/layout.py", "worlds/process_group.py", "comm/rounded.py"}
FIRST = {"state/handshake.py", "states.py", "sparsifiers/__init__.py"}  # compare settings, once


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return found[1]


def files(text: str) -> set[str]:
    return set(re.findall(r"`([\w/]+\.py)`", text))


@contextmanager
def crossed() -> Iterator[set[str]]:
    """The files of the library in which a function is called meanwhile."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(CORE):
            found.add(str(path.relative_to(CORE)))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)


def test_every_path_that_is_named_exists() -> None:
    named = files(TEXT) | set(re.findall(r"`((?:src|studies|tests|docs)[\w/]*)`", TEXT))
    assert named
    for path in named:
        assert (ROOT / path).exists() or (CORE / path).exists(), path


def test_every_module_of_the_core_is_in_the_table() -> None:
    """Those that only pass on what others define may be left out."""
    named = files(section("Where each part of a step lives"))
    for path in CORE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        if path.name != "__init__.py" or any(
            isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree.body
        ):
            assert str(path.relative_to(CORE)) in named, path


@pytest.fixture(scope="module")
def steps() -> list[set[str]]:
    """What each of several steps of virtual workers crosses from begin to finish."""
    reducers = virtual_reducers("exdyna", DENSITY, world_size=WORLD_SIZE)
    found = []
    for step in range(STEPS):
        grads = gradients("normal", N, WORLD_SIZE, step)
        befores = [torch.empty_like(grad) for grad in grads]
        for reducer in reducers:
            reducer.open(N, grads[0].device)
        with crossed() as seen:
            programs = []
            for reducer, grad, before in zip(reducers, grads, befores, strict=True):
                reducer.begin()
                reducer.add(grad, 0, before)
                programs.append(reducer.finish())
            VirtualWorld(WORLD_SIZE).run(programs)
        found.append(seen)
    return found


def test_walk_of_a_step(steps: list[set[str]]) -> None:
    text = section("Walk: one step of `sparsify` with ExDyna")
    named = files(text) - AROUND
    assert steps[-1] == named - FIRST
    assert steps[0] == named
    assert f"crosses {len(steps[-1])} files" in text


def test_walk_of_a_round() -> None:
    text = section("Walk: one round of `share`")
    workers = Workers(WORLD_SIZE)
    for step in range(STEPS):
        workers.compute(step)
        with crossed() as seen:
            workers.driver.after_step()
        if step == 0:
            first = seen
    named = files(text) - {"share/sieve.py"}
    assert seen == named
    assert first == named | FIRST
    assert f"crosses {len(seen)} files" in text
