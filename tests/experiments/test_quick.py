"""The quick versions of all experiments, as a user runs them: each ends in a verdict, and the page shows it."""

import json
from pathlib import Path

import pytest
from studies.__main__ import app
from studies.reproduce import EXPERIMENTS
from studies.reproduce.base import OURS, SOURCES
from typer.testing import CliRunner

PAPERS = [name for name, each in EXPERIMENTS.items() if each.source != OURS]


def test_every_experiment_of_the_papers_is_there() -> None:
    asked = (
        "fig1a fig1b fig1c hetero density buildup imbalance cost breakdown batch random accuracy ablation table1"
    )
    assert asked.split() == PAPERS
    assert all(each.source in SOURCES for each in EXPERIMENTS.values())


@pytest.mark.slow
def test_all_quick(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["all", "--quick", "--json", "--out", str(tmp_path / "out")])
    assert done.exit_code in (0, 1), done.output
    found = json.loads(done.stdout)
    assert [each["id"] for each in found] == PAPERS
    verdicts = [each["finding"]["verdict"] for each in found]
    assert set(verdicts) <= {"reproduced", "not reproduced"}
    assert done.exit_code == (0 if set(verdicts) == {"reproduced"} else 1)
    assert all(each["finding"]["checks"] for each in found)
    page = (tmp_path / "out" / "page.html").read_text()
    assert all(f'id="{name}"' in page for name in PAPERS)
