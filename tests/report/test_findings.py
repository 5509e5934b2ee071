"""The page of experiments: everything that was found is on it, and a browser draws it without a complaint."""

import shutil
from pathlib import Path

import pytest
from chromium import chromium
from studies.page import render_findings, write_findings
from studies.reproduce.base import OURS, Check, Figure, Finding, Grid, Line
from studies.reproduce.outcomes import Outcome

HOSTILE = "</script><script>alert(1)</script>"


def outcome(name: str, holds: bool, label: str = "topk") -> Outcome:
    lines = [Line(label, [1.0, 10.0, 100.0], [0.5, None, 0.01]), Line("exdyna", [1.0, 10.0], [2.0, 1.0])]
    figures = [
        Figure("a", "error against bits", "bits", "error", lines, "Lower is better.", log_x=True, log_y=True),
        Figure("b", "nothing", "x", "y", [Line("topk", [], [])]),
    ]
    grid = Grid("Every method", ["method", "cost"], [["topk", "3.1x"], ["exdyna", "1.0x"]])
    finding = Finding([Check(f"ratio of {name} >= 10", "12.5", holds)], figures, [grid], "On madelon, 20 workers.")
    return Outcome(name, OURS, f"Claim {name}.", False, 1.5, "python -m studies x", {"date": "today"}, finding)


def test_everything_is_on_the_page() -> None:
    page = render_findings([outcome("one", True), outcome("two", False)])
    assert "1 of 2 experiments reproduced all that is claimed; 1 of 2 criteria hold." in page
    for words in ("Claim one.", "ratio of two &gt;= 10", "12.5", "On madelon, 20 workers.", "3.1x", "date today"):
        assert words in page
    assert page.count("not reproduced</span>") == 1


def test_no_experiment_is_refused() -> None:
    with pytest.raises(ValueError, match="a page must have one experiment at least, got none"):
        render_findings([])


def test_outcomes_survive_json() -> None:
    found = outcome("one", True)
    assert Finding.from_dict(found.finding.as_dict()) == found.finding


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_draws_it(tmp_path: Path, width: int) -> None:
    page = tmp_path / "page.html"
    write_findings([outcome("one", True), outcome("two", False, HOSTILE)], page)
    binary = shutil.which("chromium")
    assert binary
    with chromium(binary, tmp_path / "profile") as browser:
        browser.open(page, width, "light")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate("document.querySelectorAll('.canvas svg.main-svg').length") >= 2
        assert browser.evaluate("document.querySelectorAll('.canvas').length") == 2
        assert browser.complaints() == []
