"""The examples run as they say, and stay short."""

import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 60
    launcher = [*TORCHRUN, "--rdzv-endpoint", "localhost:0"] if "torchrun" in text else []
    done = subprocess.run([sys.executable, *launcher, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout
