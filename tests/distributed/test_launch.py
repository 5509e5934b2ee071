"""Starting workers: results come back, failures end all of them, nobody is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradsieve._check import BadInput
from gradsieve_lab.launch import Post, WorkerFailed, run_workers


def add_ranks(post: Post, factor: int) -> tuple[int, float]:
    total = torch.tensor(float(post.rank * factor))
    dist.all_reduce(total)
    post.tell(f"worker {post.rank}")
    return post.rank, float(total)


def fail(post: Post, rank: int, how: str) -> None:
    dist.barrier()
    if post.rank == rank:
        if how == "raise":
            raise LookupError("the third worker is lost")
        if how == "refuse":
            raise BadInput("data must be there, got none")
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # the others wait for it here


def wait_for_stop(post: Post) -> int:
    turns = 0
    while not post.stop_requested():
        time.sleep(0.01)
        turns += 1
    return turns


def test_results_and_words_come_back() -> None:
    heard: list[str] = []
    assert run_workers(add_ranks, 3, 10, listen=heard.append) == [(0, 30.0), (1, 30.0), (2, 30.0)]
    assert sorted(heard) == ["worker 0", "worker 1", "worker 2"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "LookupError: the third worker is lost"),
        ("kill", "it was killed by signal 9 (SIGKILL)"),
        ("exit", "it ended with exit code 3 and no message"),
    ],
)
def test_the_first_failure_is_told_and_ends_all(how: str, words: str) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        run_workers(fail, 3, 2, how)
    assert "worker 2 of 3 failed" in str(caught.value)
    assert words in str(caught.value)
    assert time.monotonic() - started < 60


def test_bad_input_found_by_a_worker_is_one_sentence() -> None:
    with pytest.raises(BadInput) as caught:
        run_workers(fail, 2, 1, "refuse")
    assert str(caught.value) == "data must be there, got none"


def test_a_request_to_stop_reaches_all() -> None:
    asked = time.monotonic() + 0.5
    assert len(run_workers(wait_for_stop, 2, stop_requested=lambda: time.monotonic() > asked)) == 2


SCRIPT = """
import os, sys, time
from gradsieve_lab.launch import run_workers

def work(post):
    with open(f"{sys.argv[1]}/{post.rank}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(120)

if __name__ == "__main__":
    run_workers(work, 2)
"""


def test_no_worker_outlives_a_killed_starter(tmp_path: Path) -> None:
    """Also where TMPDIR is too long for the address of the fork server's socket."""
    long = tmp_path / ("x" * 60)
    long.mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    ids = tmp_path / "ids"
    ids.mkdir()
    command = [sys.executable, str(tmp_path / "script.py"), str(ids)]
    starter = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(long)})
    try:
        wait_until(lambda: starter.poll() or len([path for path in ids.iterdir() if path.read_text()]) == 2)
        assert starter.poll() is None
        workers = [int(path.read_text()) for path in ids.iterdir()]
    finally:
        starter.kill()
        starter.wait()
    wait_until(lambda: not any(alive(worker) for worker in workers))


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(true: object, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)
