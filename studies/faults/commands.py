"""Trials of the command `gradsieve train`, alone and under torchrun: the starter, its fork server, a worker."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from studies.faults.trials import Result

_TRAIN = (
    "train mlp --workers 2 --steps 24 --batch 8 --limit 200 --eval-every 24 --checkpoint-every 4 --timeout 20 "
    "--json"
)
_EXPECTED: list[list[float]] = []


def train(folder: Path, *more: str) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "gradsieve", *_TRAIN.split(), *more]
    return _start([*words, "--out", str(folder / "run")], folder)


def _start(words: list[str], folder: Path) -> "subprocess.Popen[bytes]":
    log = (folder / "log").open("ab")
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True, env=settings)


def family(session: int) -> dict[int, str]:
    """The processes of a session that still live, with their command lines."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ProcessLookupError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                found[int(path.name)] = (path / "cmdline").read_text()
    return found


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "run" / "records.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


def expected(folder: Path) -> list[float]:
    if not _EXPECTED:
        place = folder / "calm"
        place.mkdir()
        train(place).wait(300)
        _EXPECTED.append(losses(place))
        shutil.rmtree(place)
    return _EXPECTED[0]


def command_trial(chance: random.Random, folder: Path) -> Result:
    """A process of `train` is killed, told to end, or stopped; then the run is resumed."""
    wanted, target = expected(folder), chance.choice(["starter", "fork server", "worker"])
    name = chance.choice(["SIGKILL", "SIGTERM", "SIGSTOP"])
    process, what = train(folder), f"{name} to the {target}"
    deadline = time.monotonic() + 120
    while (
        not (folder / "run" / "records.jsonl").exists() and process.poll() is None and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    time.sleep(chance.uniform(0.0, 1.0))
    victim = _victim(process.pid, target, chance)
    started = time.monotonic()
    with suppress(ProcessLookupError):
        os.kill(victim, signal.Signals[name])
    if name == "SIGSTOP" and target != "worker":
        time.sleep(2)
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)  # only a worker is waited for with a limit
    try:
        process.wait(90)
    except subprocess.TimeoutExpired:
        _end(process.pid)
        return Result("train", False, f"{what}: hung")
    known = time.monotonic() - started
    orphans = _orphans(process.pid)
    for _ in range(2):
        if not (folder / "run").exists():
            train(folder).wait(300)
        elif len(losses(folder)) < len(wanted):
            words = [sys.executable, "-m", "gradsieve", "train", "--resume", str(folder / "run"), "--json"]
            if _start(words, folder).wait(300):
                shutil.rmtree(folder / "run")  # killed before its first checkpoint
    ok = losses(folder) == wanted and not orphans and not list(folder.rglob("*.partial"))
    return Result("train", ok, f"{what}: {'resumed to the same losses' if ok else f'orphans {orphans}'}", known)


def _victim(session: int, target: str, chance: random.Random) -> int:
    others = {pid: words for pid, words in family(session).items() if pid != session}
    servers = [pid for pid, words in others.items() if "forkserver" in words]
    if target == "starter" or not others:
        return session
    if target == "fork server" and servers:
        return min(servers)
    workers = sorted(set(servers) - {min(servers)}) if len(servers) > 1 else sorted(others)
    return chance.choice(workers)


def _orphans(session: int) -> list[str]:
    """What is left of a session a moment after its leader has ended."""
    deadline = time.monotonic() + 5
    while (left := family(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return list(left.values())


def _end(session: int) -> None:
    for pid in family(session):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def torchrun_trial(chance: random.Random, folder: Path) -> Result:
    """torchrun starts `gradsieve train` again after a worker was killed, and it goes on from its checkpoint."""
    wanted = expected(folder)
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
    ]
    words += ["2", "--no-python", sys.executable, "-m", "gradsieve", *_TRAIN.replace(" --workers 2", "").split()]
    process = _start([*words, "--out", str(folder / "run")], folder)
    latest, deadline = folder / "run" / "checkpoint" / "latest.json", time.monotonic() + 120
    while not latest.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = [
        pid for pid, line in _descendants(process.pid).items() if "train" in line and "--no-python" not in line
    ]
    if workers:
        with suppress(ProcessLookupError):
            os.kill(chance.choice(sorted(workers)), signal.SIGKILL)
    try:
        code = process.wait(180)
    except subprocess.TimeoutExpired:
        _end(process.pid)
        return Result("torchrun", False, "hung")
    found = losses(folder) if (folder / "run").exists() else []
    return Result("torchrun", code == 0 and found == wanted, f"exit code {code}, {len(found)} steps")


def _descendants(root: int) -> dict[int, str]:
    """All processes below another; torchrun gives its workers sessions of their own."""
    parents, lines = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ProcessLookupError):
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            lines[int(path.name)] = (path / "cmdline").read_text()
    found, grown = {root}, True
    while grown:
        new = {pid for pid, parent in parents.items() if parent in found} - found
        found, grown = found | new, bool(new)
    return {pid: lines[pid] for pid in found - {root} if pid in lines}
