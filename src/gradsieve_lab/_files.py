"""Atomic writes and file locks."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from gradsieve._check import BadInput


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically, through a partial one beside it; on an error an older file is kept."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)  # it may be a stranger's link to another file
        with partial.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    except OSError as problem:
        raise BadInput(f"{path} could not be written: {problem.strerror}") from problem
    finally:
        partial.unlink(missing_ok=True)


def try_lock(path: Path) -> int | None:
    """Lock a file until this process ends or the returned descriptor is closed; None if another process has it.

    The kernel keeps the lock: it is released however the process ends, and works across PID namespaces. Whoever had
    it may remove the file: then another file is there by now, or none, and that one must be locked.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)
