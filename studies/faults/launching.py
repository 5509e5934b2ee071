"""Start the workers of a trial, wait for them with a limit, and leave none behind."""

import json
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradsieve_lab.launch import Place
from studies.faults.worker import Plan, enter

_STARTUP_S = 60.0  # this machine may be busy


def launch(
    plan: Plan, places: Sequence[Place] | None = None, meanwhile: Callable[[list[Any]], None] | None = None
) -> "Launch":
    """Run all workers of a plan, from start to end."""
    context = multiprocessing.get_context("fork")  # safe: the trial has its own process, in which nothing else runs
    Path(plan.reports).mkdir(parents=True, exist_ok=True)
    for old in Path(plan.reports).glob("*"):
        old.unlink()
    store = tempfile.mktemp(dir=plan.reports, prefix="store-")
    where = places or [Place()] * plan.world_size
    processes = [
        context.Process(target=enter, args=(rank, store, plan, where[rank]), daemon=True)
        for rank in range(plan.world_size)
    ]
    started = time.monotonic()
    for process in processes:
        process.start()
    if meanwhile is not None:
        meanwhile(processes)
    hung = _wait(plan, processes, started)
    for process in processes:
        with suppress(ProcessLookupError):
            if process.is_alive():
                os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    return Launch(plan, hung)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(plan: Plan, processes: list[Any], started: float) -> list[int]:
    """Wait until all but a stopped victim have exited; returns the ranks that hung."""
    others = [
        rank for rank in range(plan.world_size) if rank != plan.victim or plan.fault in ("kill", "term", "raise")
    ]
    limit = _STARTUP_S + plan.steps * plan.pause + 4 * (plan.timeout + 10)
    for rank in others:
        processes[rank].join(max(0.1, started + limit - time.monotonic()))
    return [rank for rank in others if processes[rank].is_alive()]


class Launch:
    """The workers' reports."""

    def __init__(self, plan: Plan, hung: list[int]) -> None:
        folder = Path(plan.reports)
        self.hung = hung
        found = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
        self.reports = {report["rank"]: report for report in found}
        fault = folder / "fault"
        self.fault_at = float(fault.read_text()) if fault.exists() else None

    @property
    def weights(self) -> str | None:
        """The final weights, if all workers finished with the same."""
        found = {report.get("weights") for report in self.reports.values()}
        return found.pop() if len(found) == 1 else None

    def survivors(self, victim: int) -> list[dict[str, Any]]:
        return [report for rank, report in self.reports.items() if rank != victim]
