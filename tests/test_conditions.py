"""What is written under every figure."""

import re
import subprocess

import pytest

from gradsieve_lab.conditions import commit, conditions, in_words
from helpers import ROOT


def test_the_commit_is_named() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    found = conditions()["commit"]
    assert re.fullmatch(r"[0-9a-f]{10,}\+?", found)
    assert head.stdout.startswith(found.removesuffix("+"))
    assert f"commit {found}" in in_words(conditions())


def test_outside_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradsieve_lab.conditions.__file__", "/nowhere/gradsieve/conditions.py")
    assert commit.__wrapped__() == "unknown"


def test_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert commit.__wrapped__() == "unknown"
