"""docs/gpu.md: its table is what its arithmetic gives, its limits are those of the tests."""

import re

import pytest

from helpers import ROOT
from ops import test_gpu_compiled as compiled

TEXT = (ROOT / "docs" / "gpu.md").read_text()


def test_roofline(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(code, {})
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2
    for row in rows:
        assert row in TEXT.splitlines()


def test_limits() -> None:
    registers, shared = compiled.MOST_REGISTERS, compiled.MOST_SHARED_BYTES
    assert f"at most {registers} registers per thread and {shared >> 10} KiB of shared memory" in TEXT


def test_files_that_are_named() -> None:
    for path in re.findall(r"`(tests/[\w/]+\.py)`", TEXT):
        assert (ROOT / path).exists(), path
