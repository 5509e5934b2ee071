"""Tags for the files of a process, which show others whether it still runs."""

import os
from pathlib import Path


def tag(number: int | None = None) -> str:
    """The PID and start time of a process, by default of this one: PIDs are reused."""
    number = os.getpid() if number is None else number
    return f"{number}-{_begun(number)}"


def lives(tag: str) -> bool:
    """Whether the process of a tag still runs."""
    number, _, begun = tag.partition("-")
    return begun != "" and _begun(int(number)) == begun


def _begun(number: int) -> str:
    """The start time of a process, in the kernel's ticks; empty if it does not exist or is a zombie."""
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return ""
    state, *fields = text.rpartition(")")[2].split()  # the name before it may contain spaces
    return "" if state in "ZX" else fields[18]
