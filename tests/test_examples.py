"""The examples run as they say, and stay short."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import ROOT, needs_bf16, skip_without

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
FRAMEWORKS = {"accelerate", "lightning", "ray", "transformers"}
# Ray keeps no token for a cluster that ends with the script; its workers find each other on loopback.
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "disabled", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def frameworks_of(path: Path) -> set[str]:
    return FRAMEWORKS & set(re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE))


def cases() -> list[Any]:
    """Examples with a framework are run by tests/integrations, which import it once for all that needs it."""
    return [
        pytest.param(path, marks=[pytest.mark.slow] * bool(frameworks_of(path)), id=path.stem) for path in EXAMPLES
    ]


@pytest.mark.parametrize("path", cases())
def test_example(path: Path) -> None:
    text = path.read_text()
    if "bfloat16" in text:
        needs_bf16()
    skip_without(*frameworks_of(path))
    launcher = [*TORCHRUN, "--rdzv-endpoint", "localhost:0"] if "torchrun" in text else []
    command = [sys.executable, *launcher, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert losses == sorted(losses, reverse=True) or path.stem == "amp", "the first thing a user sees must fall"


def test_examples_are_short() -> None:
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) < 60, path
