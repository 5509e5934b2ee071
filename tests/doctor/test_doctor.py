"""`gradsieve doctor` as a user runs it: alone, with torchrun, with mistakes planted, with bad options."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradsieve import doctor
from gradsieve.doctor.page import page
from gradsieve.ops.schema import SCHEMAS
from helpers import ROOT

COLUMNS, SCREEN = 80, 40
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint")

# On worker 1 a kernel returns something else, and an update differs in the last bit of one element.
PLANTED = """
import os, sys
import torch
from gradsieve import doctor
from gradsieve.doctor import checks

if os.environ["RANK"] == "1":
    checks.reference.all_finite = lambda x: ~x.isfinite().all()
    reduce = checks.SparseReducer.reduce

    def other(self, grad):
        update = yield from reduce(self, grad)
        update[7] = torch.nextafter(update[7], torch.tensor(9.0))
        return update

    checks.SparseReducer.reduce = other
sys.exit(doctor.main(["--seconds", "0.1"]))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    done = run("-m", "gradsieve", "doctor", "--json", "--seconds", "0.1")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_one_process(alone: dict[str, Any]) -> None:
    assert alone["ok"]
    assert alone["workers"] == 1
    assert alone["machines"][0]["kernels"] == "Numba"
    assert [check["ok"] for check in alone["checks"]] == [True] * 3
    assert alone["link"] == {}
    (rows,) = alone["speeds"]
    assert {row["kernel"] for row in rows} == set(SCHEMAS) - {"scatter_pieces_"}
    for row in rows:
        assert row["seconds"] > 0
        assert row["of_copy"] == pytest.approx(row["copy_seconds"] / row["seconds"])


def test_one_screen_for_many_workers(alone: dict[str, Any]) -> None:
    many = copy.deepcopy(alone)
    many["workers"] = 64
    many["machines"] = [{**many["machines"][0], "host": f"host{i // 8}", "cuda": "13.0"} for i in range(64)]
    many["speeds"] *= 64
    for check in many["checks"]:
        check["ok"], check["failures"] = False, [f"worker {i}: {'words ' * 30}" for i in range(64)]
    many["ok"] = False
    lines = page(many).splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert len(lines) <= SCREEN + 9  # a failed check may say more than fits on a screen
    assert len(page(alone).splitlines()) <= SCREEN
    assert "64 on 8 host(s)" in lines[1] + lines[2]
    assert "FAILED" in lines[-1]


def test_two_processes_by_torchrun() -> None:
    done = run(*TORCHRUN, "localhost:0", "-m", "gradsieve", "doctor", "--seconds", "0.5")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= SCREEN
    assert max(map(len, lines)) <= COLUMNS
    assert "workers  2 on 1 host(s), backend gloo" in lines
    assert sum(line.startswith("ok   ") for line in lines) == 3
    assert any(line.startswith("all-reduce ") and "MB/s" in line for line in lines)
    assert any(line.startswith("to the next, slowest ") for line in lines)
    assert lines[-1].startswith("all checks passed")


def test_mistakes_are_found_and_named(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    done = run(*TORCHRUN, "localhost:0", str(tmp_path / "planted.py"))
    assert done.returncode == 1
    assert "FAIL kernels that select   failed on 1 worker(s)" in done.stdout
    assert "worker 1: all_finite is not what the plain kernel returns" in done.stdout
    assert "ok   kernels that move" in done.stdout
    assert "worker 0: exdyna, step 0: workers hold different updates" in done.stdout
    assert "of a copy" not in done.stdout  # no speed of what is wrong


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seconds", "-1"], "--seconds must be positive and finite, got -1.0"),
        (["--seconds", "soon"], "invalid float value: 'soon'"),
        (["--backend", "nccl", "--device", "cpu"], "--backend must be gloo or auto without a GPU, got nccl"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_bad_options(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        doctor.main(arguments)
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert words in said.err
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


def test_in_the_laboratory_too() -> None:
    done = run("-m", "gradsieve", "--help")
    assert " doctor " in done.stdout
    code = "from gradsieve_lab.cli import main; main()"
    done = run("-c", code, "doctor", "--seconds", "0")
    assert done.returncode == 2
    assert done.stderr.strip() == "gradsieve doctor: --seconds must be positive and finite, got 0.0"
