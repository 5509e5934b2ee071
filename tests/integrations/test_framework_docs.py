"""docs/frameworks.md is true: versions are those that the tests install, and its files and names exist."""

import re

import pytest

from helpers import ROOT

TEXT = (ROOT / "docs" / "frameworks.md").read_text()
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
ROWS = {"PyTorch": "torch", "Accelerate": "accelerate", "Transformers": "transformers", "Fabric": "lightning"}


@pytest.mark.parametrize(("title", "package"), [*ROWS.items(), ("Lightning", "lightning"), ("Ray Train", "ray")])
def test_versions(title: str, package: str) -> None:
    row = re.search(rf"^\| {title}\b.*$", TEXT, re.MULTILINE)
    assert row is not None
    assert f"| {PINNED[package]} |" in row[0]


def test_files_and_names_exist() -> None:
    for path in re.findall(r"`(examples/\w+\.py)`", TEXT) + re.findall(r"\]\((\w+\.md)\)", TEXT):
        assert (ROOT / path).exists() or (ROOT / "docs" / path).exists(), path
    for module, name in re.findall(r"from (gradsieve\.integrations\.\w+) import (\w+)", TEXT):
        source = (ROOT / "src" / module.replace(".", "/")).with_suffix(".py").read_text()
        assert re.search(rf"^(?:def|class) {name}\b", source, re.MULTILINE), name
