"""Trials of the command `gradsieve train`, alone and under torchrun: the starter, its fork server, a worker."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradsieve.worlds.processes import state_of
from gradsieve_lab._files import try_lock
from studies.faults import warm
from studies.faults.results import CALM, SLACK_S, Result

METHODS = ("exdyna", "share:every=2", "share:every=2:delay=1")
TIMEOUT_S, STARTUP_S = 8.0, 120.0
_TRAIN = (
    f"train mlp --steps 24 --batch 8 --limit 200 --eval-every 12 --checkpoint-every 3 --timeout {TIMEOUT_S} --json"
)
_OF_ITS_OWN = ("seconds", "hidden", "wire_bytes", "handshake_bytes")  # times, and what a resumed run repeats


def words_of(method: str, folder: Path) -> list[str]:
    return [*_TRAIN.split(), "--sparsifier", method, "--out", str(folder / "run"), "--workers", "2"]


def calm(method: str, folder: Path) -> list[Any]:
    """Make an undisturbed run; returns its record."""
    process = _start(words_of(method, folder), folder)
    process.join(300)
    found = record(folder)
    assert process.exitcode == 0, (folder / "log").read_text()[-1000:]
    assert len(found) > 24, "24 steps and the metrics"
    return found


def record(folder: Path) -> list[Any]:
    """Steps and metrics of a record, without fields that depend on the clock or on repeated handshakes."""
    path = folder / "run" / "records.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found: list[Any] = []
    for line in lines:
        if line["kind"] == "step":
            found.append({key: line[key] for key in line if key not in _OF_ITS_OWN})
        elif line["kind"] == "metric":
            found.append([line["step"], line["value"]])
    return found


def command_trial(chance: random.Random, folder: Path) -> Result:
    """A process of `train` is killed, told to end, or stopped; then the run is resumed."""
    method, target = chance.choice(METHODS), chance.choice(["starter", "fork server", "worker"])
    name, moment = chance.choice(["SIGKILL", "SIGTERM", "SIGSTOP"]), chance.choice(["startup", "step", "save"])
    process = _start(words_of(method, folder), folder)
    _await(moment, chance, process, folder, nth=chance.randrange(1, 6))
    started = time.monotonic()
    target, victim = _victim(process.pid, target, chance, folder)
    what = f"{method}, {name} to the {target} in {moment}"
    with suppress(ProcessLookupError):
        os.kill(victim, signal.Signals[name])
    if name == "SIGSTOP" and target != "worker":
        time.sleep(2)  # the wait has a limit only for workers
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)
    process.join(STARTUP_S)
    if process.is_alive():
        _end(process.pid)
        return Result("train", False, f"{what}: hung")
    known = time.monotonic() - started
    orphans = _orphans(process.pid)
    problem = f"orphans {orphans}" if orphans else _resumed(method, folder)
    if not problem and process.exitcode and known > TIMEOUT_S + SLACK_S:
        problem = f"known after {known:.0f} s only"
    return Result("train", not problem, f"{what}: {problem or 'resumed to the same record'}", known)


def _resumed(method: str, folder: Path) -> str:
    """Resume until the end, as a user would; returns what is wrong."""
    wanted = CALM[method]
    if record(folder) != wanted:
        again = _start(["train", "--resume", str(folder / "run"), "--json"], folder)
        again.join(STARTUP_S)
        if again.exitcode != 0:
            if (folder / "run" / "checkpoint" / "latest.json").exists():
                return f"exit code {again.exitcode} of --resume: {(folder / 'log').read_text()[-300:]}"
            shutil.rmtree(folder / "run", ignore_errors=True)  # it had no checkpoint yet
            again = _start(words_of(method, folder), folder)
            again.join(STARTUP_S)
    found = record(folder)
    if left := [path.name for path in (folder / "run").rglob("*.partial")]:
        return f"{left} left"
    if found == wanted:
        return ""
    other = next(((one, two) for one, two in zip(found, wanted, strict=False) if one != two), "a missing line")
    return f"another record, of {len(found)} lines: {other}"


def two_commands(chance: random.Random, folder: Path) -> Result:
    """Two processes resume one run at once, after a kill: one continues, the other is refused."""
    method, kind = chance.choice(METHODS), "two resume one run"
    first = _start(words_of(method, folder), folder)
    _await("save", chance, first, folder, nth=chance.randrange(2, 6))
    _end(first.pid)
    first.join()
    if not _unlocked(folder / "run"):
        return Result(kind, False, f"{method}: a killed run keeps its folder locked")
    both = [_start(["train", "--resume", str(folder / "run"), "--json"], folder) for _ in range(2)]
    for process in both:
        process.join(STARTUP_S)
    codes = sorted(str(process.exitcode) for process in both)
    problem = _resumed(method, folder)
    ok = not problem and codes in (["0", "2"], ["0", "0"])  # depends on when the second one started
    return Result(kind, ok, f"{method}: exit codes {' and '.join(codes)}, {problem or 'the same record'}")


def _unlocked(run: Path) -> bool:
    """Wait until the last process of a killed run has ended: until then, nobody may resume it."""
    deadline = time.monotonic() + STARTUP_S
    while (held := try_lock(run / ".lock")) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    os.close(held)
    return True


def _await(moment: str, chance: random.Random, process: Any, folder: Path, nth: int = 1) -> None:
    """Wait until a random time during startup or the steps, or until the nth checkpoint is being written."""
    deadline, run = time.monotonic() + STARTUP_S, folder / "run"
    begun = [run / "records.jsonl"]
    if moment == "startup":
        time.sleep(chance.uniform(0.0, 1.0))
        return
    seen: set[str] = set()  # checkpoints
    while process.is_alive() and time.monotonic() < deadline:
        if moment == "step" and begun[0].exists():
            time.sleep(chance.uniform(0.0, 0.5))
            return
        seen |= {path.name for path in (run / "checkpoint").glob(".*.partial")}
        if moment == "save" and len(seen) >= nth:
            return
        time.sleep(0.002)


def _start(words: list[str], folder: Path) -> Any:
    return warm.start(words, folder / "log", folder / "server")


def family(session: int) -> dict[int, int]:
    """Live processes of a session, with their parents."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ProcessLookupError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                found[int(path.name)] = int(fields[1])
    return found


def _victim(session: int, target: str, chance: random.Random, folder: Path) -> tuple[str, int]:
    """The target's kind and pid, or those of the starter if the target does not exist yet."""
    seen = family(session)
    server = int((folder / "server").read_text() or 0) if (folder / "server").exists() else 0
    workers = sorted(pid for pid, parent in seen.items() if parent == server)
    if target == "worker" and workers:
        return target, chance.choice(workers)
    return (target, server) if target == "fork server" and server in seen else ("starter", session)


def _orphans(session: int) -> list[str]:
    """Processes of a session that survive its leader for some seconds; they are killed."""
    deadline = time.monotonic() + 10
    while (left := family(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    names = []
    for pid in left:
        with suppress(OSError):
            names.append(f"{pid} {Path(f'/proc/{pid}/wchan').read_text()}")
            os.kill(pid, signal.SIGKILL)
    return names


def _end(session: int) -> None:
    for pid in family(session):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def torchrun_trial(chance: random.Random, folder: Path) -> Result:
    """A worker of `torchrun gradsieve train` is killed or stopped; torchrun restarts all workers."""
    method, name = chance.choice(METHODS), chance.choice(["SIGKILL", "SIGTERM", "SIGSTOP"])
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 2 --no-python"
    train = [word for word in words_of(method, folder) if word not in ("--workers", "2")]
    words = [sys.executable, *torchrun.split(), sys.executable, "-m", "gradsieve", *train]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True, env=settings)
    latest, deadline = folder / "run" / "checkpoint" / "latest.json", time.monotonic() + STARTUP_S
    while not latest.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    begun = _below(process.pid)
    born = births(begun)
    workers = [pid for pid, line in begun.items() if "train" in line and "--no-python" not in line]
    if workers:
        with suppress(ProcessLookupError):
            os.kill(chance.choice(sorted(workers)), signal.Signals[name])
    try:
        code = _ended(process, born)
    except subprocess.TimeoutExpired:
        for pid in [*_below(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return Result("torchrun", False, f"{method}, {name} to a worker: hung")
    if left := outlived(born):
        problem = f"orphans {left}"
    else:
        problem = _resumed(method, folder) if code == 0 else (folder / "log").read_text()[-400:]
    what = f"{method}, {name} to a worker: exit code {code}"  # SIGTERM ends a run, with a checkpoint
    return Result("torchrun", not problem, f"{what}, {problem or 'the same record'}")


def _ended(process: "subprocess.Popen[bytes]", born: dict[int, str]) -> int:
    """Wait for torchrun; the processes that it starts meanwhile are added to `born`."""
    deadline = time.monotonic() + 2 * STARTUP_S
    while (code := process.poll()) is None:
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(process.args, 2 * STARTUP_S)
        born |= births(_below(process.pid))
        time.sleep(0.2)
    return code


def births(pids: Iterable[int]) -> dict[int, str]:
    """When each of these processes began: numbers of processes that have ended are used again."""
    return {pid: begun for pid in pids if (begun := state_of(pid)[1])}


def outlived(born: dict[int, str], patience: float = 10.0) -> list[int]:
    """Those of the processes, by pid and time of birth, that still live after some seconds; they are killed."""
    deadline = time.monotonic() + patience
    while (left := [pid for pid, begun in born.items() if _lives(pid, begun)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def _lives(pid: int, begun: str) -> bool:
    state, now = state_of(pid)
    return now == begun and state not in "ZX"


def _below(root: int) -> dict[int, str]:
    """All processes below another; torchrun gives each worker its own session."""
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
