"""The examples run as they say, and stay short."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT, needs_bf16, skip_without

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
FRAMEWORKS = {"accelerate", "lightning", "ray", "transformers"}
# Ray keeps no token for a cluster that ends with the script; its workers find each other on loopback.
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "disabled", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path) -> None:
    text = path.read_text()
    if "bfloat16" in text:
        needs_bf16()
    assert len(text.splitlines()) < 60
    skip_without(*FRAMEWORKS & set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)))
    launcher = [*TORCHRUN, "--rdzv-endpoint", "localhost:0"] if "torchrun" in text else []
    command = [sys.executable, *launcher, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert losses == sorted(losses, reverse=True) or path.stem == "amp", "the first thing a user sees must fall"
