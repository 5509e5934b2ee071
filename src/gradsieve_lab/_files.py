"""Files that appear whole or not at all."""

import os
from pathlib import Path

from gradsieve._check import BadInput


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file through a partial one beside it; on an error nothing is left, and an older file stands."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    except OSError as problem:
        raise BadInput(f"{path} could not be written: {problem.strerror}") from problem
    finally:
        partial.unlink(missing_ok=True)
