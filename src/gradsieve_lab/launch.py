"""Workers on this machine: gloo processes, on loopback or in network namespaces, supervised by their parent.

If a worker fails, all end, with the traceback of the one that failed first; none outlives the parent.
"""

import ctypes
import functools
import gc
import multiprocessing
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradsieve._check import BadInput
from gradsieve.worlds import PeerLost
from gradsieve_lab import _owner
from gradsieve_lab._files import try_lock

TIMEOUT_S = 300.0  # of a collective; a dead worker is noticed at once, this is for stopped ones
_GRACE = 1.0  # seconds to collect other failures after the first
# Imported once, by the fork server. A process's first optimizer imports torch._dynamo, which takes seconds.
_PRELOAD = ["gradsieve_lab.runs.running", "torch.distributed", "torch.nn.parallel", "torch._dynamo"]


_LOCK = "lock"  # in a scratch folder, held by its owner
_LONGEST = 45  # characters of a folder's path that leave room for the fork server's socket: its address has 107
_YOUNG_S = 60.0  # seconds that a scratch folder may exist before it is locked
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of Linux
_LIBC = ctypes.CDLL(None, use_errno=True)
_MALLOC = {-1: 1 << 30, -3: 1 << 25}  # glibc's M_TRIM_THRESHOLD, and M_MMAP_THRESHOLD as high as glibc itself goes


class WorkerFailed(RuntimeError):
    """A worker raised an error or was killed; the message contains its traceback."""


def new_network() -> None:
    """Move this thread into a new network namespace, without any interface that is up."""
    _checked(_LIBC.unshare(_NEW_NETWORK))


def enter_network(namespace: str) -> None:
    """Move this thread into the network namespace of a file."""
    file = os.open(namespace, os.O_RDONLY)
    try:
        _checked(_LIBC.setns(file, _NEW_NETWORK))
    finally:
        os.close(file)


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@dataclass(frozen=True)
class Place:
    """The network namespace (by default that of its parent) and the interface of a worker's sockets."""

    namespace: str = ""  # a file that refers to it
    interface: str = "lo"

    def enter(self) -> None:
        """Move this process there. Call it before starting threads: they inherit the namespace."""
        if self.namespace:
            enter_network(self.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface

    def sent(self) -> tuple[int, int]:
        """Bytes, headers included, and packets that the interface has sent so far, by the kernel's count."""
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == self.interface:
                bytes_, packets = counters.split()[8:10]
                return int(bytes_), int(packets)
        raise OSError(f"no interface {self.interface} here")


@dataclass(frozen=True)
class Post:
    """A worker's rank and place, and its connection to the parent process."""

    rank: int
    workers: int
    tell: Callable[[Any], None]
    stop_requested: Callable[[], bool]
    place: Place = Place()


def run_workers(
    work: Callable[..., Any],
    workers: int,
    *arguments: Any,
    timeout: float = TIMEOUT_S,
    places: Sequence[Place] | None = None,
    listen: Callable[[Any], None] | None = None,
    stop_requested: Callable[[], bool] | None = None,
) -> list[Any]:
    """Run `work(post, *arguments)` in each of `workers` processes; returns their results in rank order.

    They communicate over loopback, or from the given places; a collective times out after `timeout` seconds.
    `listen` receives what workers pass to `tell`; `stop_requested` is polled here and passed on to workers.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(dir=_scratch()) as folder:
        lines, processes = [], []
        try:
            for rank in range(workers):
                here, there = context.Pipe()
                place = Place() if places is None else places[rank]
                setting = (rank, workers, place, timeout, str(Path(folder) / "store"), there)
                process = context.Process(target=_enter, args=(setting, work, arguments), daemon=True)
                process.start()
                there.close()
                lines.append(here)
                processes.append(process)
            return _watch(lines, processes, listen, stop_requested)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


@functools.cache
def _scratch() -> Path:
    """This process's scratch folder, removed when it ends; also removes those of killed processes."""
    wanted = tempfile.gettempdir()
    above = Path(wanted if len(wanted) <= _LONGEST else "/tmp")
    for old in above.glob("gradsieve-*-*"):
        if _abandoned(old):
            shutil.rmtree(old, ignore_errors=True)
    mine = above / f"gradsieve-{_owner.tag()}-{secrets.token_hex(3)}"
    mine.mkdir(mode=0o700)
    try_lock(mine / _LOCK)
    before, tempfile.tempdir = tempfile.tempdir, str(mine)
    try:
        util.get_temp_dir()  # the fork server's socket is there, too
    finally:
        tempfile.tempdir = before
    util.Finalize(None, shutil.rmtree, args=(mine, True), exitpriority=-1000)  # after multiprocessing's own
    return mine


def _abandoned(folder: Path) -> bool:
    """Whether a scratch folder's owner has ended. Its PID does not show it: it may be of another namespace."""
    lock = folder / _LOCK
    try:
        if not lock.exists():
            return time.time() - folder.stat().st_mtime > _YOUNG_S
        held = try_lock(lock)
    except OSError:
        return False
    if held is not None:
        os.close(held)
    return held is not None


def _watch(
    lines: list[Connection],
    processes: list[Any],
    listen: Callable[[Any], None] | None,
    stop_requested: Callable[[], bool] | None,
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str, bool]] = []
    ranks: dict[Any, int] = {line: rank for rank, line in enumerate(lines)}
    deadline, stopping = float("inf"), False
    while len(results) < len(processes) and time.monotonic() < deadline:
        if not stopping and stop_requested is not None and stop_requested():
            stopping = True
            for worker in lines:
                with suppress(OSError):  # the worker has finished
                    worker.send("stop")
        for line in wait(list(ranks), timeout=0.1):
            assert isinstance(line, Connection)
            rank = ranks[line]
            try:
                kind, *what = line.recv()
            except EOFError:
                del ranks[line]
                if rank not in results and rank not in {failure[1] for failure in failures}:
                    processes[rank].join()
                    failures.append((0.0, rank, _cause(processes[rank].exitcode), False))
                continue
            if kind == "message" and listen is not None:
                listen(what[0])
            elif kind == "done":
                results[rank] = what[0]
            elif kind == "failed":
                failures.append((what[0], rank, what[1], what[2]))
        if failures and deadline == float("inf"):
            deadline = time.monotonic() + _GRACE
    if failures:
        # A killed worker has no time of failure and comes first: the others only lost their peer.
        _, rank, text, refused = min(failures)
        if refused:
            raise BadInput(text)
        raise WorkerFailed(f"worker {rank} of {len(processes)} failed and ended the run:\n{text}")
    return [results[rank] for rank in range(len(processes))]


def _cause(code: int) -> str:
    if code < 0:
        return f"it was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"it ended with exit code {code} and no message"


def _enter(
    setting: tuple[int, int, Place, float, str, Connection], work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    rank, workers, place, timeout, store, line = setting
    # Ctrl-C reaches all processes of the terminal: only the parent handles it, and notifies the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        place.enter()
        _exit_with_parent()
        _keep_freed_memory()
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=workers, timeout=limit)
        post = Post(rank, workers, lambda what: line.send(("message", what)), line.poll, place)
        result = work(post, *arguments)
        gc.collect()  # models that outlive their process group can crash gloo at exit
        dist.barrier()
        line.send(("done", result))
        dist.destroy_process_group()
    except BadInput as error:
        line.send(("failed", time.monotonic(), str(error), True))
        os._exit(1)
    except PeerLost as error:
        line.send(("failed", time.monotonic(), str(error), False))
        os._exit(1)
    except BaseException:
        line.send(("failed", time.monotonic(), traceback.format_exc(), False))
        os._exit(1)


def _keep_freed_memory() -> None:
    """Keep glibc from returning freed gradients to the system: each step would map them again, page by page."""
    with suppress(AttributeError):  # another C library
        for setting, size in _MALLOC.items():
            _LIBC.mallopt(setting, size)


def _exit_with_parent() -> None:
    """Exit at once when the parent process ends, for whatever reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
