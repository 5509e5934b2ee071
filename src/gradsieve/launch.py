"""Workers on this machine: gloo processes on loopback, watched by the process that started them.

Whatever ends a worker ends all of them, with the traceback of the one that failed first; none outlives its starter.
"""

import gc
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradsieve._check import BadInput

TIMEOUT = timedelta(minutes=10)  # of a collective; a dead worker is noticed at once, this is for hung ones
_GRACE = 1.0  # seconds in which the failures of one moment are collected
_PRELOAD = ["gradsieve.experiments.running", "torch.distributed", "torch.nn.parallel"]  # imported once for all


class WorkerFailed(RuntimeError):
    """A worker raised an error or was killed; the message holds its traceback."""


@dataclass(frozen=True)
class Post:
    """What a worker knows of itself, and its line to the process that started it."""

    rank: int
    workers: int
    tell: Callable[[Any], None]
    stop_requested: Callable[[], bool]


def run_workers(
    work: Callable[..., Any],
    workers: int,
    *arguments: Any,
    listen: Callable[[Any], None] | None = None,
    stop_requested: Callable[[], bool] | None = None,
) -> list[Any]:
    """`work(post, *arguments)` in each of `workers` processes; returns their results in rank order.

    `listen` receives what workers `tell`; `stop_requested` is asked here and answered there.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    stop = context.Event()
    with tempfile.TemporaryDirectory(prefix="gradsieve-") as folder:
        lines, processes = [], []
        try:
            for rank in range(workers):
                here, there = context.Pipe(duplex=False)
                setting = (rank, workers, str(Path(folder) / "store"), there, stop)
                process = context.Process(target=_enter, args=(setting, work, arguments), daemon=True)
                process.start()
                there.close()
                lines.append(here)
                processes.append(process)
            return _watch(lines, processes, stop, listen, stop_requested)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _watch(
    lines: list[Connection],
    processes: list[Any],
    stop: Any,
    listen: Callable[[Any], None] | None,
    stop_requested: Callable[[], bool] | None,
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str, bool]] = []
    ranks: dict[Any, int] = {line: rank for rank, line in enumerate(lines)}
    deadline = float("inf")
    while len(results) < len(processes) and time.monotonic() < deadline:
        if stop_requested is not None and stop_requested():
            stop.set()
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
            if kind == "told" and listen is not None:
                listen(what[0])
            elif kind == "done":
                results[rank] = what[0]
            elif kind == "failed":
                failures.append((what[0], rank, what[1], what[2]))
        if failures and deadline == float("inf"):
            deadline = time.monotonic() + _GRACE
    if failures:
        # A worker that was killed left no time of failure and comes first: the others only lost their peer.
        _, rank, text, refused = min(failures)
        if refused:
            raise BadInput(text)
        raise WorkerFailed(f"worker {rank} of {len(processes)} failed and ended the run:\n{text}")
    return [results[rank] for rank in range(len(processes))]


def _cause(code: int) -> str:
    if code < 0:
        return f"it was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"it ended with exit code {code} and without a word"


def _enter(
    setting: tuple[int, int, str, Connection, Any], work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    rank, workers, store, line, stop = setting
    # Ctrl-C reaches the whole terminal: only the starter decides, and tells the workers through `stop`.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_the_starter()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=workers, timeout=TIMEOUT
        )
        post = Post(rank, workers, lambda what: line.send(("told", what)), stop.is_set)
        result = work(post, *arguments)
        gc.collect()  # models that outlive their process group can crash gloo at exit
        dist.barrier()
        line.send(("done", result))
        dist.destroy_process_group()
    except BadInput as error:
        line.send(("failed", time.monotonic(), str(error), True))
        os._exit(1)
    except BaseException:
        line.send(("failed", time.monotonic(), traceback.format_exc(), False))
        os._exit(1)


def _die_with_the_starter() -> None:
    """If the process that started this one is gone, however it went, end at once."""
    starter = multiprocessing.parent_process()
    assert starter is not None

    def watch() -> None:
        wait([starter.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
