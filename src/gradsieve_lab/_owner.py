"""Names for what a process leaves outside of itself, so that others can tell whether it still lives."""

import os
from pathlib import Path


def tag() -> str:
    """This process, by its number and the moment it began: a number alone comes back."""
    return f"{os.getpid()}-{_begun(os.getpid())}"


def lives(tag: str) -> bool:
    """Whether the process of a tag still runs."""
    number, _, begun = tag.partition("-")
    return begun != "" and _begun(int(number)) == begun


def _begun(number: int) -> str:
    """When a process began, in the kernel's ticks; empty if there is none, or a dead one not yet waited for."""
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return ""
    state, *fields = text.rpartition(")")[2].split()  # the name before it may hold spaces
    return "" if state in "ZX" else fields[18]
