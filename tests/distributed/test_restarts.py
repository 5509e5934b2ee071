"""Whose a run's folder is: restarts of torchrun continue their own run, and nobody removes another's."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from test_launch import wait_until
from test_runs import TINY, began

from gradsieve._check import BadInput
from gradsieve_lab.runs import running
from gradsieve_lab.runs.records import NAME, RecordError, read_run
from gradsieve_lab.runs.restarts import agent, own_run
from gradsieve_lab.runs.running import Job, Stop, _claimed, _locked, run

VIRTUAL = replace(TINY, virtual=True, steps=3, save=False)
LOGS = "/tmp/torchelastic_x/none_{}/attempt_{}/0/error.json"


def begin(folder: Path, *agents: str, command: str = "gradsieve train", saved: bool = False) -> Job:
    """A folder with a run of these agents; returns the job of a launch of agent `a`."""
    run(VIRTUAL, folder, lambda progress: None, Stop())
    lines = (folder / NAME).read_text().splitlines()
    header = {**json.loads(lines[0]), "launch": list(agents), "command": command}
    (folder / NAME).write_text("\n".join([json.dumps(header), *lines[1:], ""]))
    if saved:
        (folder / "checkpoint").mkdir()
        (folder / "checkpoint" / "latest.json").write_text("{}")
    return Job(VIRTUAL, folder, False, "gradsieve train", ("a",))


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment after a node has joined: torch counts no restart."""
    for name, value in {"RUN_ID": "none", "RESTART_COUNT": "0", "ERROR_FILE": LOGS.format("a", 0)}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("RANK", "0")


def test_an_agent_keeps_its_name_over_restarts(torchrun: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert agent() == "none_a"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", LOGS.format("a", 1))
    assert agent() == "none_a"
    for unknown in ("", "/dev/null"):  # what --log-dir /dev/null leaves
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", unknown)
        assert f"-{os.getppid()}-" in agent()


def test_a_launch_continues_what_it_began(torchrun: None, tmp_path: Path) -> None:
    job = begin(tmp_path / "saved", "a", "b", saved=True)
    assert _claimed(job).resume
    assert _claimed(replace(job, launch=("b", "c"))).resume, "one node that stayed is enough"
    job = begin(tmp_path / "unsaved", "a")
    with _locked(job.folder), pytest.raises(BadInput, match="in use by another process"):
        _claimed(job)
    assert read_run(job.folder).steps
    assert not _claimed(job).resume
    assert not job.folder.exists()


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize(("owner", "command"), [("z", "gradsieve train"), ("a", "gradsieve train mlp")])
def test_a_folder_of_another_launch_stays(
    torchrun: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str, command: str, saved: bool
) -> None:
    """An older run of the same rendezvous id, or another command of this launch, whatever the count of restarts."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    job = begin(tmp_path / "run", owner, command=command, saved=saved)
    before = (job.folder / NAME).read_bytes()
    with pytest.raises(BadInput, match="out must be a new folder"):
        _claimed(job)
    assert (job.folder / NAME).read_bytes() == before
    (job.folder / NAME).write_text("no record")
    with pytest.raises(BadInput, match="out must be a new folder"):
        _claimed(job)
    assert own_run(tmp_path / "nothing", ("a",), "gradsieve train") is None


def test_two_runs_with_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both found it new; the one that loses leaves the other's alone, which has no step yet."""
    folder = tmp_path / "run"

    def winner_is_quicker(place: Path) -> None:
        monkeypatch.undo()
        begin(folder, "z")
        text = (folder / NAME).read_text()
        (folder / NAME).write_text(text[: text.index("\n") + 1])

    monkeypatch.setattr(running, "check_new", winner_is_quicker)
    with pytest.raises(BadInput, match="could not be made: File exists"):
        run(VIRTUAL, folder, lambda progress: None, Stop())
    assert read_run(folder).header["launch"] == ["z"]


def test_a_run_that_fails_before_its_first_step_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        raise RecordError("the disk is full")

    for owner, name in ((running.Training, "run"), (running.Recorder, "add")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails)
            with pytest.raises(RecordError):
                run(VIRTUAL, tmp_path / "run", lambda progress: None, Stop())
        assert not (tmp_path / "run").exists()


WORDS = ("train", "mlp", "--width", "0.2", "--batch", "8", "--checkpoint-every", "5", "--steps", "1000000", "--out")


def launch(folder: Path, *options: str) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--max-restarts", "1", *options]
    command = [sys.executable, *launcher, "-m", "gradsieve", *WORDS, str(folder), "--json"]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=settings)


@pytest.mark.slow
def test_torchrun_never_touches_an_older_run(tmp_path: Path) -> None:
    """Neither at once, nor after it has started the workers again."""
    folder = tmp_path / "run"
    begin(folder, "z", command=f"gradsieve {shlex.join([*WORDS, str(folder), '--json'])}", saved=True)
    before = (folder / NAME).read_bytes()
    process = launch(folder, "--rdzv-endpoint", "localhost:0", "--nproc-per-node", "2")
    _, said = process.communicate(timeout=120)
    assert process.returncode != 0
    assert said.count("gradsieve: out must be a new folder") == 2, said
    assert (folder / NAME).read_bytes() == before


@pytest.mark.slow
def test_a_run_goes_on_after_a_node_has_joined(tmp_path: Path) -> None:
    """torch does not count that as a restart."""
    folder, agents = tmp_path / "run", list[subprocess.Popen[str]]()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    options = ["--nnodes", "1:2", "--rdzv-conf", "is_host=0,last_call_timeout=1", "--local-addr", "127.0.0.1"]
    options += ["--rdzv-endpoint", f"127.0.0.1:{store.port}", "--nproc-per-node", "1"]
    try:
        agents.append(launch(folder, *options))
        wait_until(lambda: (folder / "checkpoint" / "latest.json").exists())
        assert read_run(folder).settings["workers"] == 1
        agents.append(launch(folder, *options))
        wait_until(lambda: read_run(folder).settings["workers"] == 2)
        resumed = read_run(folder)
        assert len(resumed.header["launch"]) == 2
        assert len(resumed.steps) >= 5
        wait_until(lambda: began(folder, len(resumed.steps) + 5))
    finally:
        for agent_of_node in agents:
            agent_of_node.terminate()
        for agent_of_node in agents:
            agent_of_node.communicate(timeout=60)
