"""Imports point one way: a module uses what stands before it in this list, never what stands behind."""

import ast
import statistics
import sys
from pathlib import Path

import pytest

from helpers import ROOT

CORE = [
    "_version",
    "_check",
    "states",
    "ops",
    "comm",
    "density",
    "feedback",
    "sparsifiers",
    "method",
    "arena",
    "gradients",
    "reports",
    "totals",
    "state",
    "reducer",
    "regrouping",
    "virtual",
    "worlds",
    "share",
    "fsdp",
    "ddp",
    "dcp",
    "plan",
    "integrations",
    "extend",
    "doctor",
]
LAB = ["_files", "_owner", "conditions", "analysis", "launch", "netlab", "tasks", "runs", "report", "bench", "cli"]
ORDER = {"gradsieve": CORE, "gradsieve_lab": LAB}
ABOVE = {"gradsieve": ("gradsieve_lab", "studies"), "gradsieve_lab": ("studies",), "studies": ()}
FOLDERS = {**{package: ROOT / "src" / package for package in ORDER}, "studies": ROOT / "studies"}
LONGEST = {"gradsieve": 300, "gradsieve_lab": 400, "studies": 400}  # lines of a file


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


@pytest.mark.parametrize("package", ORDER)
def test_every_module_has_its_place(package: str) -> None:
    here = {path.name.removesuffix(".py") for path in FOLDERS[package].iterdir() if not path.name.startswith("__")}
    assert here - {"py.typed"} == set(ORDER[package])


@pytest.mark.parametrize("package", ORDER)
def test_imports_point_one_way(package: str) -> None:
    order = ORDER[package]
    for path in FOLDERS[package].rglob("*.py"):
        own = path.relative_to(FOLDERS[package]).parts[0].removesuffix(".py")
        if own.startswith("__"):
            continue
        for module in imports(path):
            base, *rest = module.split(".")
            if base == package and rest and rest[0] in order:
                assert order.index(rest[0]) <= order.index(own), f"{path.name} imports {module}"


@pytest.mark.parametrize("package", ABOVE)
def test_the_library_does_not_know_the_laboratory_nor_this_the_studies(package: str) -> None:
    for path in FOLDERS[package].rglob("*.py"):
        if path != FOLDERS["gradsieve"] / "__main__.py":  # the command, which is the laboratory's
            found = {module.split(".")[0] for module in imports(path)}
            assert not found & set(ABOVE[package]), path


def test_nothing_below_the_worlds_knows_torch_distributed() -> None:
    for path in FOLDERS["gradsieve"].rglob("*.py"):
        own = path.relative_to(FOLDERS["gradsieve"]).parts[0].removesuffix(".py")
        if own in CORE and CORE.index(own) < CORE.index("worlds"):
            assert not any(module.startswith("torch.distributed") for module in imports(path)), path


def test_the_library_needs_little() -> None:
    """What `pip install gradsieve` brings, and what comes with Python."""
    known = {"gradsieve", "torch", "numba", "llvmlite", "numpy", "safetensors", "scipy", *sys.stdlib_module_names}
    for path in FOLDERS["gradsieve"].rglob("*.py"):
        if path.name != "__main__.py":
            optional = {"triton"} if path.match("ops/gpu*.py") else set()
            optional |= {path.stem, "accelerate"} if path.parent.name == "integrations" else set()
            assert {module.split(".")[0] for module in imports(path)} <= known | optional, path


def test_nothing_else_imports_the_integrations() -> None:
    for path in FOLDERS["gradsieve"].rglob("*.py"):
        if path.parent.name != "integrations":
            assert not any(module.startswith("gradsieve.integrations") for module in imports(path)), path


def lengths(*folders: Path) -> dict[Path, int]:
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    return {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in paths}


@pytest.mark.parametrize("package", LONGEST)
def test_files_stay_short(package: str) -> None:
    found = lengths(FOLDERS[package])
    assert found
    assert not {path: length for path, length in found.items() if length > LONGEST[package]}


def test_most_files_are_shorter() -> None:
    assert statistics.median(lengths(*FOLDERS.values()).values()) < 150


def test_the_main_algorithm_is_read_in_one_sitting() -> None:
    assert 0 < sum(lengths(FOLDERS["gradsieve"] / "sparsifiers" / "exdyna").values()) <= 500
