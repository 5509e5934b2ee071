"""`gradsieve lab run` and `compare --lab-hosts`, as a user starts, stops and kills them."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

TINY = ("--steps", "6", "--width", "0.1", "--batch", "8")
LONG = ("train", "mlp", "--steps", "100000", "--width", "0.1", "--batch", "8")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "gradsieve", *words]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=120)


def traces(number: int) -> list[str]:
    """Folders that bear the number of a process."""
    return [str(path) for path in Path(tempfile.gettempdir()).glob(f"gradsieve-{number}-*")]


def networks() -> set[str]:
    """The network namespaces of all processes, and those that are held open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        for link in [process / "ns" / "net", *_files(process)]:
            with suppress(OSError):
                found.add(os.readlink(link))
    return {name for name in found if name.startswith("net:")}


def _files(process: Path) -> list[Path]:
    try:
        return list((process / "fd").iterdir())
    except OSError:  # it has ended
        return []


def _target(link: Path) -> str:
    with suppress(OSError):
        return os.readlink(link)
    return ""


def wait_for(condition: object, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    words = command("lab", "run", "--hosts", "2", "--rate", "20mbit", "--", *LONG, "--out", str(tmp_path / "run"))
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (tmp_path / "run" / "records.jsonl").exists(), 60)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.lab
@pytest.mark.slow
def test_bytes_are_counted_beside_the_meter(tmp_path: Path) -> None:
    words = ("compare", "mlp", "--sparsifiers", "dense,exdyna:values=bf16", "--lab-hosts", "2", "--lab-rate")
    done = run(*words, "100mbit/50mbit", *TINY, "--json", "--out", str(tmp_path / "runs"))
    assert done.returncode == 0, done.stderr
    for row in json.loads(done.stdout):
        assert row["workers"] == 2
        assert row["wire_bytes_per_step"] > row["bytes_per_step"] > 0
    page = (tmp_path / "runs" / "report.html").read_text()
    assert "2 lab hosts on 100mbit/50mbit links" in page
    assert ">counted<" in page


@pytest.mark.lab
def test_a_killed_lab_leaves_nothing(long_run: subprocess.Popen[str]) -> None:
    """The kernel removes its networks with its last process; the next run removes its folder."""
    held = {name for name in map(_target, _files(Path(f"/proc/{long_run.pid}"))) if name.startswith("net:")}
    assert len(held) == 3  # two hosts and the switch
    assert len(traces(long_run.pid)) == 1
    long_run.kill()
    long_run.wait()
    wait_for(lambda: not held & networks(), 10)
    done = run("lab", "run", "--hosts", "1", "--", *LONG[:2], *TINY, "--out", str(Path(os.devnull) / "no"))
    assert done.returncode == 2
    assert "could not be made" in done.stderr
    assert traces(long_run.pid) == []


@pytest.mark.slow
@pytest.mark.lab
def test_ctrl_c_leaves_a_checkpoint_and_nothing_else(long_run: subprocess.Popen[str], tmp_path: Path) -> None:
    time.sleep(1)
    long_run.send_signal(signal.SIGINT)
    assert long_run.wait(60) == 130
    assert (tmp_path / "run" / "checkpoint").is_dir()
    assert traces(long_run.pid) == []


@pytest.mark.slow
@pytest.mark.lab
def test_ten_runs_three_of_them_killed(tmp_path: Path) -> None:
    chance = random.Random(0)
    doomed = set(chance.sample(range(9), 3))  # the last one cleans up
    numbers: list[int] = []
    before = networks()
    for turn in range(10):
        words = command("lab", "run", "--hosts", "3", "--", *LONG[:2], *TINY, "--out", str(tmp_path / str(turn)))
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        numbers.append(process.pid)
        if turn in doomed:
            time.sleep(chance.uniform(0.5, 7))
            process.kill()
            process.wait()
        else:
            _, said = process.communicate(timeout=120)
            assert process.returncode == 0, said
    wait_for(lambda: networks() <= before, 10)
    assert [traces(number) for number in numbers] == [[]] * 10
