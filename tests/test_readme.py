"""What the README shows, works; what it says of itself, is true."""

import re

import pytest

from helpers import ROOT

TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_block(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_every_file_that_is_named_exists() -> None:
    for path in re.findall(r"\]\(([^)#:]+)\)", TEXT) + re.findall(r"`([\w/]+\.(?:csv|cff|md|py))`", TEXT):
        assert (ROOT / path).exists(), path


def test_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", TEXT):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
