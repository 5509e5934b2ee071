"""Commands with trouble from outside, forked from one process that has torch loaded: loading takes seconds."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from studies.faults.disks import root, small_disk
from test_launch import wait_until
from test_runs import TINY, began, children, train

from gradsieve_lab.runs.records import read_run
from helpers import ROOT

SERVER = """
import json, sys
import torch._dynamo
from gradsieve_lab.cli import main
from pathlib import Path
from studies.faults import warm

started = {}
for line in sys.stdin:
    name, words = json.loads(line)
    if words:
        started[name] = warm.start(words, Path(f"{name}.log"), Path(f"{name}.server"))
        print(started[name].pid, flush=True)
    else:
        started[name].join(60)
        print(started[name].exitcode, flush=True)
for process in started.values():
    process.kill()
"""


class Commands:
    """Starts commands in the processes of a server, and waits for their exit codes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER], cwd=folder, env=settings, stdin=pipe, stdout=pipe, text=True
        )

    def _ask(self, *what: Any) -> int:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(what) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def start(self, name: str, *words: object) -> int:
        """Returns the process's number."""
        return self._ask(name, [str(word) for word in words])

    def wait(self, name: str) -> int:
        """The exit code."""
        return self._ask(name, [])

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    made = Commands(tmp_path_factory.mktemp("commands"))
    yield made
    assert made.server.stdin is not None
    made.server.stdin.close()
    made.server.wait(60)


MLP = ("train", "mlp", "--workers", "2", "--width", "0.2", "--batch", "8")


@pytest.mark.slow  # the lock alone is in test_hostile_records.py
def test_two_resume_one_run(commands: Commands, tmp_path: Path) -> None:
    """One continues; the other is refused meanwhile, or finds a finished run."""
    folder, steps = tmp_path / "run", TINY.steps + 100
    train(replace(TINY, virtual=True), folder)
    for name in ("one", "other"):
        commands.start(name, "train", "--resume", folder, "--steps", steps, "--json")
    codes = {name: commands.wait(name) for name in ("one", "other")}
    assert sorted(codes.values()) in ([0, 0], [0, 2]), codes
    for name, code in codes.items():
        assert code == 0 or "is in use by another process: wait until it ends" in commands.said(name)
    run = read_run(folder)
    assert [step.step for step in run.steps] == list(range(steps))
    assert run.end == {"kind": "end", "reason": "finished", "step": steps}


def test_a_stopped_worker_is_named_after_the_timeout(commands: Commands, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    commands.start("stopped", *MLP, "--steps", "100000", "--timeout", "1.5", "--out", folder)
    wait_until(lambda: began(folder, 5))
    worker = max(children(int((commands.folder / "stopped.server").read_text())))
    os.kill(worker, signal.SIGSTOP)
    since = time.monotonic()
    assert commands.wait("stopped") == 1
    assert time.monotonic() - since < 20
    assert "did not take part: no answer after 1.5 s in step" in commands.said("stopped")
    assert "(its process is stopped)" in commands.said("stopped")


@pytest.mark.skipif(not root(), reason="must run as root (mounts a small disk)")
def test_a_disk_that_gets_full_in_a_checkpoint(commands: Commands, tmp_path: Path) -> None:
    """The checkpoint before is kept, and the run goes on from it when there is room."""
    train(replace(TINY, virtual=True, steps=3), tmp_path / "measured")
    size = sum(path.stat().st_size for path in (tmp_path / "measured").glob("checkpoint/**/*") if path.is_file())
    with small_disk(tmp_path / "disk", size * 3 // 2048):  # one and a half
        folder = tmp_path / "disk" / "run"
        commands.start("full", *MLP, "--virtual", "--checkpoint-every", "3", "--steps", "30", "--out", folder)
        assert commands.wait("full") == 2
        words = commands.said("full").strip().splitlines()[-1]
        assert words.startswith("gradsieve: checkpoint in ")
        assert "the previous one is kept: rank " in words
        assert "No space left on device" in words
        assert not list(folder.rglob("*.partial"))
        assert len(read_run(folder).steps) >= 6
        subprocess.run(["mount", "-o", "remount,size=16m", str(tmp_path / "disk")], check=True)
        commands.start("again", "train", "--resume", folder, "--json")
        assert commands.wait("again") == 0, commands.said("again")
        assert len(read_run(folder).steps) == 30


def test_a_lost_terminal_leaves_a_checkpoint(tmp_path: Path) -> None:
    """Its end closes the pipe of the progress, and sends SIGHUP."""
    words = [*MLP, "--virtual", "--steps", "1000000", "--eval-every", "2", "--out", str(tmp_path / "run")]
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); from gradsieve_lab.cli import main; main()"
    command, pipe = [sys.executable, "-c", code, *words], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    wait_until(lambda: began(tmp_path / "run", 10))
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) != 0
    run = read_run(tmp_path / "run")
    assert run.end is not None
    assert run.end["reason"] == "stopped"
    latest = json.loads((tmp_path / "run" / "checkpoint" / "latest.json").read_text())["checkpoint"]
    assert latest.startswith(f"step-{len(run.steps)}-")
