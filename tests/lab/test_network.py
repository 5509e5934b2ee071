"""Hosts that exist while they are needed, and nothing of them afterwards."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradsieve._check import BadInput
from gradsieve_lab import _owner
from gradsieve_lab.launch import Post, WorkerFailed, run_workers
from gradsieve_lab.netlab.network import check_possible, network
from gradsieve_lab.netlab.programs import run_everywhere
from gradsieve_lab.netlab.rates import parse_links

MEGABYTE = 10**6


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


def held() -> list[str]:
    """The network namespaces that this process holds open."""
    return [kind for file in Path("/proc/self/fd").iterdir() if (kind := _target(file)).startswith("net:")]


def _target(file: Path) -> str:
    try:
        return os.readlink(file)
    except OSError:  # the file of the listing itself
        return ""


def _transfer(post: Post) -> tuple[float, int, int]:
    """Worker 0 sends a megabyte to worker 1; the time it took, and what this host sent."""
    dist.barrier()
    before, _ = post.place.sent()
    started = time.perf_counter()
    message = torch.ones(MEGABYTE, dtype=torch.uint8)
    if post.rank == 0:
        dist.send(message, 1)
    elif post.rank == 1:
        message.zero_()
        dist.recv(message, 0)
    elapsed = time.perf_counter() - started
    dist.barrier()
    return elapsed, post.place.sent()[0] - before, int(message.sum())


@pytest.mark.lab
def test_links_are_as_slow_as_they_are_told() -> None:
    with network(parse_links("40mbit,40mbit/20mbit,1gbit", 3)) as made:
        assert len(held()) == 4  # three hosts and the switch
        assert "198.18." not in ip("address")
        results = run_workers(_transfer, 3, places=made.places(3))
    (_, sent, _), (took, received, content), (_, idle, _) = results
    assert content == MEGABYTE
    assert took >= 0.9 * MEGABYTE * 8 / 20e6  # the slower of the two ends decides
    assert 1.0 <= sent / MEGABYTE <= 1.12
    assert received < 0.1 * MEGABYTE
    assert idle < 0.1 * MEGABYTE
    assert held() == []


def _fail(post: Post) -> None:
    raise ArithmeticError("on purpose")


@pytest.mark.lab
def test_errors_leave_nothing() -> None:
    with pytest.raises(WorkerFailed, match="on purpose"), network(parse_links("1gbit", 2)) as made:
        run_workers(_fail, 2, places=made.places(2))
    assert held() == []


@pytest.mark.lab
def test_programs_know_their_place(capfd: pytest.CaptureFixture[str]) -> None:
    with network(parse_links("1gbit", 2)) as made:
        show = 'echo "$RANK $WORLD_SIZE $MASTER_ADDR $(ip -br address show eth0 | wc -l)"'
        assert run_everywhere(made, ["sh", "-c", show], lambda: False) == 0
        assert sorted(capfd.readouterr().out.splitlines()) == ["0 2 198.18.0.1 1", "1 2 198.18.0.1 1"]
        assert run_everywhere(made, ["sh", "-c", "test $RANK = 1 && exit 7; sleep 60"], lambda: False) == 7
        assert run_everywhere(made, ["sleep", "60"], lambda: True) == 0


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("ip", "needs the program ip, which is not"),
        ("tc", "needs the program tc"),
        ("root", "must run as root or in a user namespace"),
    ],
)
def test_what_is_missing_is_said(missing: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == missing else f"/sbin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000 if missing == "root" else 0)
    with pytest.raises(BadInput, match=words):
        check_possible()


USER = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]


def as_user(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "HOME": str(folder),
        "NUMBA_CACHE_DIR": str(folder),
        "PYTHONPATH": ":".join(path for path in sys.path if path),
    }
    return subprocess.run([*USER, *words], capture_output=True, text=True, cwd="/", env=environment, timeout=120)


@pytest.mark.lab
def test_an_ordinary_user_has_labs_too(tmp_path: Path) -> None:
    """The command starts itself again in a user namespace and finds its own hosts there."""
    pythons = [sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"]
    trial = "{} -c 'import typer'"  # by a shell: setpriv itself still finds what only root may read
    readable = [p for p in pythons if not as_user("sh", "-c", trial.format(p), folder=tmp_path).returncode]
    if not readable:
        pytest.skip("no Python here that an ordinary user can read")
    show = "print(open('/proc/net/dev').read())"
    words = ["-m", "gradsieve", "lab", "run", "--hosts", "2", "--rate", "50mbit", "--", readable[0], "-c", show]
    done = as_user("sh", "-c", shlex.join([readable[0], *words]), folder=tmp_path)
    if as_user("unshare", "-Urn", "true", folder=tmp_path).returncode:  # forbidden here: one sentence says so
        assert done.returncode == 2
        assert "user namespaces, which this system does not allow" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("eth0:") == 2


def test_owners() -> None:
    assert _owner.lives(_owner.tag())
    assert not _owner.lives(f"{os.getpid()}-1")  # the same number, another process
    assert not _owner.lives("999999999-1")
    child = subprocess.Popen(["sleep", "60"])
    tag = f"{child.pid}-{_owner._begun(child.pid)}"
    assert _owner.lives(tag)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not _owner.lives(tag)  # dead, though nobody waited for it yet
    assert not _owner.lives(f"{child.pid}-")  # a tag taken from a dead process
    child.wait()
