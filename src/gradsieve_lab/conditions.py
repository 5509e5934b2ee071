"""The conditions of a measurement: machine, versions, commit, date."""

import datetime
import functools
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy
import torch

from gradsieve._version import __version__


def conditions() -> dict[str, str]:
    """The conditions to print under every table and plot."""
    return {
        "gradsieve": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": importlib.metadata.version("numba"),
        "numpy": numpy.__version__,
        "machine": f"{_cpu()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def in_words(found: Mapping[str, str]) -> str:
    """Conditions in one line."""
    return ", ".join(f"{name} {value}" for name, value in found.items())


@functools.cache
def commit() -> str:
    """The commit of this code, with a plus sign if files were changed since; "unknown" outside a clone."""
    folder = Path(__file__).resolve().parent
    if not any((parent / ".git").exists() for parent in folder.parents):
        return "unknown"
    try:
        described = ["git", "-C", str(folder), "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"]
        return subprocess.run(described, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown CPU"
