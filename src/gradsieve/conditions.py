"""Under what conditions a figure was measured: machine, versions, date."""

import datetime
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import numba
import numpy
import torch

from gradsieve._version import __version__


def conditions() -> dict[str, str]:
    """What belongs under every table and plot."""
    return {
        "gradsieve": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
        "numpy": numpy.__version__,
        "machine": f"{_cpu()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def in_words(found: Mapping[str, str]) -> str:
    """Conditions in one line."""
    return ", ".join(f"{name} {value}" for name, value in found.items())


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown CPU"
