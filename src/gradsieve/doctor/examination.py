"""Runs all checks and measurements, on all workers; the result is a dictionary for JSON."""

import time
from collections.abc import Callable
from typing import Any

from gradsieve.doctor.checks import CHECKS
from gradsieve.doctor.group import Group
from gradsieve.doctor.link import link
from gradsieve.doctor.machine import machine
from gradsieve.doctor.speeds import speeds

FORMAT = 1  # of the dictionary


def examine(group: Group, seconds: float) -> dict[str, Any]:
    """Machine, laws, kernels, network. Speeds are measured only if all laws hold."""
    began = time.monotonic()
    machines = group.gather(machine(group))
    checks = [_checked(group, name, check) for name, check in CHECKS.items()]
    ok = all(check["ok"] for check in checks)
    measured = group.gather(speeds(group, seconds * 0.7)) if ok else []
    network = link(group, seconds * 0.3) if ok else {}
    return {
        "format": FORMAT,
        "ok": ok,
        "workers": group.size,
        "machines": machines,
        "checks": checks,
        "speeds": measured,
        "link": network,
        "seconds": round(time.monotonic() - began, 1),
    }


def _checked(group: Group, name: str, check: Callable[[Group], str]) -> dict[str, Any]:
    """Run a check, which passes if it passes on every worker. Any error in it is a result, not a crash."""
    try:
        found = {"ok": True, "detail": check(group)}
    except Exception as error:
        words = f"{error}" or type(error).__name__
        found = {"ok": False, "detail": words.splitlines()[0]}
    every = group.gather(found)
    failures = [f"worker {rank}: {each['detail']}" for rank, each in enumerate(every) if not each["ok"]]
    return {"name": name, "ok": not failures, "detail": found["detail"], "failures": failures}
