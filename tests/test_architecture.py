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

from gradsieve import VirtualWorld, ops, virtual_reducers
from helpers import ROOT, gradients
from virtual_replicas import Workers

TEXT = (ROOT / "docs" / "architecture.md").read_text()
CORE = ROOT / "src" / "gradsieve"
N, WORLD_SIZE, DENSITY = 20_000, 4, 0.01
STEPS = 12  # after these ExDyna has a level to look for
LONGEST_PATH = 10  # files that a reader opens to follow a step of ExDyna


def section(title: str, level: str = "##") -> str:
    found = re.search(rf"^{level} {re.escape(title)}\n(.*?)(?=^#+ |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return found[1]


def files(text: str) -> set[str]:
    return set(re.findall(r"`([\w/]+\.py)`", text))


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Before calls are traced, which slows Numba down."""
    ops.warm_up()


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
    reducers, world = virtual_reducers("exdyna", DENSITY, world_size=WORLD_SIZE), VirtualWorld(WORLD_SIZE)
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
            world.run(programs)
        found.append(seen)
    return found


def main_path() -> set[str]:
    """The first file of each numbered line, in which a step's decisions are made."""
    return set(re.findall(r"^ *\d+\. `([\w/]+\.py)`:", section("The main path", "###"), re.MULTILINE))


def leaned_on() -> tuple[set[str], set[str]]:
    """What the main path leans on in every step, and in the first one only."""
    always, first = section("What it leans on", "###").split("The first step also")
    return files(always), files(first)


def test_walk_of_a_step(steps: list[set[str]]) -> None:
    always, first = leaned_on()
    assert steps[-1] == main_path() | always
    assert steps[0] == main_path() | always | first
    text = section("Walk: one step of `sparsify` with ExDyna")
    counts = [len(steps[-1]), len(main_path()), len(always)]
    assert f"functions in {counts[0]} files. In {counts[1]} of them" in text.replace("\n", " ")
    assert f"other {counts[2]} are" in text.replace("\n", " ")


def test_main_path_is_short_and_has_all_that_decides() -> None:
    """What it leans on are kernels, worlds, the meter, and modules of values: see the page."""
    assert 0 < len(main_path()) <= LONGEST_PATH
    assert not main_path() & leaned_on()[0]
    values = {"comm/step.py", "comm/collectives.py", "sparsifiers/base.py", "reports.py"}
    for path in leaned_on()[0] - values - {"comm/traffic.py"}:
        assert path.startswith(("ops/", "worlds/")), path


def test_a_selection_crosses_four_files() -> None:
    text = section("The main path", "###")
    numbered = dict(re.findall(r"^ *(\d+)\. `([\w/]+\.py)`:", text, re.MULTILINE))
    stated = re.search(r"A selection, .* is files (\d+), (\d+), (\d+) and (\d+)\.", text)
    assert stated is not None
    reducers, world = virtual_reducers("exdyna", DENSITY, world_size=WORLD_SIZE), VirtualWorld(WORLD_SIZE)
    for step in range(STEPS):
        world.run(
            [
                reducer.reduce(grad)
                for reducer, grad in zip(reducers, gradients("normal", N, WORLD_SIZE, step), strict=True)
            ]
        )
    grads = gradients("normal", N, WORLD_SIZE, STEPS)
    steps = [reducer._next_step() for reducer in reducers]
    sparsifier = reducers[0].method.sparsifier
    own = [reducer.states.sparsifier for reducer in reducers]
    with crossed() as seen:
        windows = [sparsifier.window(state, step) for state, step in zip(own, steps, strict=True)]
        hits = [ops.select_above(grad, *window) for grad, window in zip(grads, windows, strict=True)]
        world.run([sparsifier.select(*of) for of in zip(own, grads, hits, steps, strict=True)])
    assert seen & main_path() == {numbered[number] for number in stated.groups()}


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
    assert first == named | leaned_on()[1]
    assert f"functions in {len(seen)} files" in text.replace("\n", " ")
