"""Whole runs in real processes, through the command line."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_launch import alive, wait_until

from gradsieve_lab.runs.methods import parse_method
from gradsieve_lab.runs.records import NAME, Run, read_run
from gradsieve_lab.runs.running import Stop, run
from gradsieve_lab.runs.settings import Settings
from gradsieve_lab.runs.summary import summarise
from gradsieve_lab.tasks import TASKS

TINY = Settings("mlp", workers=2, steps=20, batch=16, width=0.2, eval_every=10, density=0.05)
# Settings in which a few steps of a small model are enough to learn something.
TASKS_TINY: dict[str, dict[str, Any]] = {
    "logreg": {"width": 0.02, "limit": 200, "steps": 60},
    "mlp": {"width": 0.2, "limit": 500, "steps": 40},
    "cnn": {"width": 0.5, "limit": 400, "steps": 40},
    "resnet": {"width": 0.5, "limit": 400, "steps": 30},
    "vgg": {"width": 0.125, "limit": 400, "steps": 40},
    "lstm": {"width": 0.25, "limit": 400, "steps": 40},
    "gpt": {"width": 0.25, "limit": 400, "steps": 40},
    "bert": {"width": 0.5, "limit": 2000, "steps": 150},
    "ncf": {"width": 0.5, "steps": 150},
}
COMMAND = [sys.executable, "-c", "from gradsieve_lab.cli import main; main()"]


def train(settings: Settings, folder: Path, **more: Any) -> Run:
    done = run(settings, folder, lambda progress: None, Stop(), **more)
    assert done is not None
    return done


# That every task learns with virtual workers is in tests/tasks; here one with each kind of optimizer.
IN_PROCESSES = [("mlp", "exdyna"), ("gpt", "exdyna")]
SLOWLY = [(task, method) for task in TASKS for method in ("dense", "exdyna") if (task, method) not in IN_PROCESSES]


@pytest.mark.parametrize(
    ("task", "method"), [*IN_PROCESSES, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOWLY)]
)
def test_every_task_learns(tmp_path: Path, task: str, method: str) -> None:
    settings = Settings(task, workers=2, eval_every=1000, save=False, **TASKS_TINY[task])
    done = train(settings.with_method(parse_method(method, 0.1)), tmp_path / "run")
    first, last = (done.metrics[place]["value"] for place in (0, -1))
    better = last > first if done.metric.higher_is_better else last < first
    assert better, f"{done.metric.name} went from {first} to {last}"
    assert done.end == {"kind": "end", "reason": "finished", "step": settings.steps}


@pytest.mark.parametrize(
    "method",
    [
        "topk",
        "exdyna",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("cltk", "hard_threshold:threshold=0.01")),
    ],
)
def test_processes_do_what_virtual_workers_do(tmp_path: Path, method: str) -> None:
    settings = TINY.with_method(parse_method(method, 0.05))
    real = train(settings, tmp_path / "real")
    virtual = train(replace(settings, virtual=True), tmp_path / "virtual")
    assert [line.union for line in real.steps[:3]] == [line.union for line in virtual.steps[:3]]
    for one, other in zip(real.steps, virtual.steps, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-3)
        assert one.bytes == pytest.approx(other.bytes, rel=0.02, abs=600)  # the handshake's labels
    assert real.metrics[-1]["value"] == pytest.approx(virtual.metrics[-1]["value"], abs=0.02)


@pytest.mark.parametrize("method", ["alone", "average:every=7"])
def test_replicas_in_processes_are_those_of_virtual_workers(tmp_path: Path, method: str) -> None:
    """To the last bit, with as many threads."""
    settings = replace(TINY, workers=3, optimizer="adam").with_method(parse_method(method, 1.0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        virtual = train(replace(settings, virtual=True), tmp_path / "virtual")
    finally:
        torch.set_num_threads(threads)
    real = train(settings, tmp_path / "real")
    assert [line["value"] for line in real.metrics] == [line["value"] for line in virtual.metrics]
    assert [line.bytes for line in real.steps] == [line.bytes for line in virtual.steps]
    parts = [sorted(path.glob("checkpoint/step-*/rank-*.safetensors")) for path in (real.folder, virtual.folder)]
    assert [len(files) for files in parts] == [3, 1 if method == "alone" else 3]
    for ours, theirs in zip(*parts, strict=False):
        one, other = load_file(ours), load_file(theirs)
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_replicas_resume_in_other_processes(tmp_path: Path) -> None:
    settings = replace(TINY, decay="constant", warm_up=0.0).with_method(parse_method("average:every=5", 1.0))
    whole = train(settings, tmp_path / "whole")
    first = train(replace(settings, steps=10), tmp_path / "parts")
    resumed = train(Settings.from_dict({**first.settings, "steps": 20}), tmp_path / "parts", resume=True)
    assert [line.loss for line in resumed.steps] == [line.loss for line in whole.steps]
    with pytest.raises(ValueError, match="go on with --workers 2"):
        train(Settings.from_dict({**first.settings, "steps": 30, "workers": 3}), tmp_path / "parts", resume=True)


@pytest.mark.parametrize(("method", "saved"), [("dense", 1), ("fp16", 2), ("powersgd:start=2", 3)])
def test_torchs_own_hooks_are_counted(tmp_path: Path, method: str, saved: float) -> None:
    row = summarise(train(replace(TINY, steps=30).with_method(parse_method(method, 1.0)), tmp_path / "run"))
    assert row.compression is not None
    assert row.compression == pytest.approx(saved, rel=1e-6) if saved < 3 else row.compression > saved
    assert row.metric_last is not None
    assert row.metric_last > 0.5
    assert min(row.forward_ms, row.backward_ms, row.communicate_ms) > 0
    assert row.step_ms >= row.forward_ms + row.backward_ms


@pytest.mark.slow  # replicas and commands resume in make test, too
@pytest.mark.parametrize("method", ["exdyna", "dense"])
def test_a_run_resumes_in_other_processes(tmp_path: Path, method: str) -> None:
    settings = replace(TINY, decay="constant", warm_up=0.0).with_method(parse_method(method, 0.05))
    whole = train(settings, tmp_path / "whole")
    first = train(replace(settings, steps=10), tmp_path / "parts")
    again = Settings.from_dict({**first.settings, "steps": 20})
    resumed = train(again, tmp_path / "parts", resume=True)
    assert [line.loss for line in resumed.steps] == [line.loss for line in whole.steps]
    more = train(replace(again, workers=3, steps=30), tmp_path / "parts", resume=True)
    assert len(more.steps) == 30


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    arguments = ["train", "mlp", "--workers", "2", "--width", "0.2", "--out", str(folder), *more]
    return subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def children(process: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == process:
            found += [int(stat.parent.name), *children(int(stat.parent.name))]
    return found


def began(folder: Path, steps: int) -> bool:
    record = folder / NAME
    return record.exists() and record.read_text().count('"kind": "step"') >= steps


@pytest.mark.parametrize("kind", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ctrl_c_leaves_a_run_that_can_go_on(tmp_path: Path, kind: signal.Signals) -> None:
    folder = tmp_path / "run"
    process = start(folder, "--steps", "100000")
    wait_until(lambda: began(folder, 5))
    family = children(process.pid)
    process.send_signal(kind)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + kind
    assert f"go on with: gradsieve train --resume {folder}" in told
    assert "Traceback" not in told
    stopped = read_run(folder)
    assert stopped.end is not None
    assert stopped.end["reason"] == "stopped"
    assert all(json.loads(line) for line in (folder / NAME).read_text().splitlines())
    wait_until(lambda: not any(alive(child) for child in family), 20)
    steps = len(stopped.steps)
    again = [*COMMAND, "train", "--resume", str(folder), "--steps", str(steps + 5), "--json"]
    done = subprocess.run(again, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["steps"] == steps + 5


def test_a_killed_worker_ends_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, "--steps", "100000")
    wait_until(lambda: began(folder, 5))
    family = children(process.pid)
    worker = next(child for child in reversed(family) if children(child) == [])
    os.kill(worker, signal.SIGKILL)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "killed by signal 9 (SIGKILL)" in told
    assert read_run(folder).end is None
    wait_until(lambda: not any(alive(child) for child in family), 20)


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    """The limit on a file's size stands for it: writes fail half-way, as on a full disk."""
    folder = tmp_path / "run"
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000)); "
        "from gradsieve_lab.cli import main; main()"
    )
    arguments = ["train", "mlp", "--workers", "2", "--width", "0.1", "--steps", "5000", "--out", str(folder)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith(f"gradsieve: {folder / NAME} could not be written: ")
    assert "Traceback" not in done.stderr
    record = (folder / NAME).read_text()
    assert record.endswith("\n")
    assert read_run(folder).steps


def test_under_torchrun(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    arguments = ["train", "mlp", "--steps", "10", "--width", "0.2", "--out", str(folder), "--json"]
    command = [sys.executable, *launcher, "--rdzv-endpoint", "localhost:0", "-m", "gradsieve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["workers"] == 2
    assert len(read_run(folder).steps) == 10
