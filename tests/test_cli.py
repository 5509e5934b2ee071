"""The command line as a person meets it."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

COLUMNS = 80


def run(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    code = "from gradsieve.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=timeout)


def test_demo_prints_a_table() -> None:
    done = run("demo", "--workers", "2", "--steps", "3", "--sparsifiers", "dense,exdyna")
    assert done.returncode == 0, done.stderr
    assert "exdyna" in done.stdout
    assert "accuracy" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= COLUMNS


def test_demo_as_json_is_the_same_every_time() -> None:
    arguments = ("demo", "--workers", "3", "--steps", "4", "--density", "0.02", "--json", "--sparsifiers")
    one, other = (json.loads(run(*arguments, "topk,exdyna").stdout) for _ in range(2))
    for result in [*one["results"], *other["results"]]:
        del result["select_ms"]
    assert one["results"] == other["results"]
    assert [result["sparsifier"] for result in one["results"]] == ["topk", "exdyna"]
    exdyna = one["results"][1]
    assert exdyna["density"] == pytest.approx(0.02, rel=0.01)
    assert one["settings"] == {"workers": 3, "steps": 4, "density": 0.02, "seed": 0}
    assert one["conditions"]["torch"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo", "--density", "1.5"), "density must be in (0, 1], got 1.5"),
        (("demo", "--workers", "0"), "workers must be at least 1, got 0"),
        (("demo", "--workers", "5000"), "workers must be at most 1500, one training image each, got 5000"),
        (("demo", "--steps", "0"), "steps must be at least 1, got 0"),
        (("demo", "--sparsifiers", "dense,none"), "sparsifier must be one of dense, topk"),
        (("bench", "kernels", "--n", "5"), "n must be at least 1000000, got 5"),
        (("bench", "step", "--workers", "2,x"), "workers must be a whole number, got 'x'"),
        (("bench", "step", "--density", "0"), "density must be in (0, 1], got 0.0"),
        (("bench", "kernels", "--out", "."), "out must be a file, got the folder ."),
    ],
)
def test_bad_input(arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("arguments", [("demo", "--steps", "many"), ("nonsense",), ("demo", "--nonsense")])
def test_bad_usage(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).returncode == 2


def test_info() -> None:
    done = run("info")
    assert done.returncode == 0
    assert "exdyna" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= COLUMNS
    known = json.loads(run("info", "--json").stdout)
    assert known["sparsifiers"]["cltk"] == {"beta": 1.0}


def test_help_lists_the_commands() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("demo", "bench", "info"))


def test_bench_kernels_writes_rows(tmp_path: Path) -> None:
    """A small run: the figures mean nothing, the rows must be complete."""
    out = tmp_path / "new" / "kernels.csv"
    done = run("bench", "kernels", "--n", "20000000", "--repeats", "1", "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(out.open()))
    printed = json.loads(done.stdout)["rows"]
    assert len(rows) == len(printed)
    assert {row["benchmark"] for row in rows} == {"kernels", "step", "selection", "memory"}
    assert all(float(row["median"]) > 0 and row["machine"] and row["date"] for row in rows if row["unit"] == "ms")
    assert len([row for row in rows if row["goal"]]) == 5
    assert [p.name for p in out.parent.iterdir()] == ["kernels.csv"]


@pytest.mark.slow
def test_bench_step_writes_rows(tmp_path: Path) -> None:
    out = tmp_path / "step.csv"
    done = run("bench", "step", "--workers", "2", "--repeats", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(out.open()))
    assert {"plain DDP", "exdyna", "fp16 hook", "compute alone"} <= {row["case"] for row in rows}
    assert [row["goal"] for row in rows if row["case"] == "exdyna"] == ["<= 1x"]
    assert max(len(line) for line in done.stdout.splitlines()) <= COLUMNS
