"""What a worker can learn about processes: whose they are, what became of them, and who keeps the store."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

T = TypeVar("T")


def within(limit: float, work: Callable[[], T]) -> list[T]:
    """The result of `work` in a list, an empty one if it takes longer: a store whose host is stopped is silent."""
    found: list[T] = []

    def attempt() -> None:
        with suppress(RuntimeError, OSError):  # the store went with its host
            found.append(work())

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(limit)
    return found


def keeps_store(store: Any) -> bool:
    """Whether the store may be in this process, and end with it: in rank 0 of all, unless a launcher keeps it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return type(store).__name__ == "TCPStore" and not elsewhere and dist.get_rank() == 0


def identity() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": host(), "pid": pid, "begun": state_of(pid)[1]}


def host() -> str:
    """This machine since it was started, and the process numbers that count here."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def state_of(pid: int) -> tuple[str, str]:
    """State and start of a process, as the kernel names them; empty if there is none."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return state, fields[18]
