"""The examples run as they are, and stay short."""

import subprocess
import sys

import pytest

from helpers import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path) -> None:  # type: ignore[no-untyped-def]
    assert len(path.read_text().splitlines()) < 60
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout
