"""Imports point one way: a module uses what stands before it in this list, never what stands behind."""

import ast
from pathlib import Path

from helpers import ROOT

ORDER = [
    "_version",
    "_check",
    "_files",
    "_owner",
    "conditions",
    "ops",
    "wire",
    "collectives",
    "exchange",
    "analysis",
    "sparsifiers",
    "handshake",
    "steps",
    "schedules",
    "reducer",
    "worlds",
    "replicas",
    "checkpoint",
    "ddp",
    "share",
    "launch",
    "lab",
    "tasks",
    "experiments",
    "report",
    "bench",
    "cli",
]
SOURCE = ROOT / "src" / "gradsieve"


def layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def test_every_module_has_its_place() -> None:
    here = {path.name.removesuffix(".py") for path in SOURCE.iterdir() if not path.name.startswith("__")}
    assert here - {"py.typed"} == set(ORDER)


def test_imports_point_one_way() -> None:
    for path in SOURCE.rglob("*.py"):
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if own.startswith("__"):
            continue
        for module in imports(path):
            target = layer(module)
            if module.startswith("gradsieve.") and target in ORDER:
                assert ORDER.index(target) <= ORDER.index(own), f"{path.name} imports {module}"


def test_nothing_below_the_worlds_knows_torch_distributed() -> None:
    for path in SOURCE.rglob("*.py"):
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if own in ORDER and ORDER.index(own) < ORDER.index("worlds"):
            assert not any(module.startswith("torch.distributed") for module in imports(path)), path


def test_files_stay_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert max(lengths.values()) <= 400
    assert sorted(lengths.values())[len(lengths) // 2] < 150
