"""The examples run as they say, and stay short."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT, needs_bf16

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path) -> None:
    text = path.read_text()
    if "bfloat16" in text:
        needs_bf16()
    assert len(text.splitlines()) < 60
    launcher = [*TORCHRUN, "--rdzv-endpoint", "localhost:0"] if "torchrun" in text else []
    done = subprocess.run([sys.executable, *launcher, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert losses == sorted(losses, reverse=True) or path.stem == "amp", "the first thing a user sees must fall"
