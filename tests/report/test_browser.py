"""The page as a browser draws it: wide and narrow, light and dark, without a complaint."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Chromium, chromium
from report_runs import four_runs, make_run

from gradsieve_lab.report import write_report

pytestmark = [
    pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed"),
]

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "report.html"
    long = make_run("exdyna compat=release d=0.001", density=0.001, steps=100, end="stopped")
    other = make_run(HOSTILE, steps=1, every=1, task="lm", dataset="text")
    write_report([*four_runs(steps=100), long, other], out)
    return out


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    binary = shutil.which("chromium")
    assert binary
    with chromium(binary, tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_and_every_plot_is_drawn(browser: Chromium, page: Path, width: int, theme: str) -> None:
    browser.open(page, width, theme)
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    plots = browser.evaluate("document.querySelectorAll('.canvas').length")
    assert plots >= 18
    drawn = "[...document.querySelectorAll('.canvas')].filter((e) => e.querySelector('svg.main-svg')).length"
    assert browser.evaluate(drawn) == plots
    outside = (
        "[...document.querySelectorAll('.plot')].filter((e) => e.getBoundingClientRect().right > innerWidth).length"
    )
    assert browser.evaluate(outside) == 0
    columns = "new Set([...document.querySelectorAll('.plot')].map((e) => Math.round(e.offsetLeft))).size"
    assert browser.evaluate(columns) == (2 if width == 1280 else 1)
    assert browser.complaints() == []


def test_a_phone_sees_the_key_columns_without_scrolling(browser: Chromium, page: Path) -> None:
    browser.open(page, 390, "light")
    tables = "[...document.querySelectorAll('.columns + .scroll')]"
    assert browser.evaluate(f"{tables}.map((e) => e.scrollWidth - e.clientWidth)") == [0, 0]
    heads = f"[...{tables}[0].querySelectorAll('thead th')].filter((e) => e.offsetWidth).map((e) => e.innerText)"
    assert browser.evaluate(heads) == ["method", "accuracy", "fewer bytes", "ms per step"]
    browser.evaluate("document.querySelector('.columns input').click()")
    assert browser.evaluate("document.querySelector('td.more').offsetWidth") > 0
    assert browser.complaints() == []


def test_the_theme_can_be_changed_and_is_remembered(browser: Chromium, page: Path) -> None:
    line = "document.querySelector('.canvas .lines path, .canvas path.js-line').style.stroke"
    ground = "getComputedStyle(document.body).backgroundColor"
    browser.open(page, 1280, "light")
    before = browser.evaluate(f"[{line}, {ground}]")
    browser.evaluate("document.getElementById('theme').click()")
    browser.wait_for("document.documentElement.dataset.drawn === 'dark'")
    after = browser.evaluate(f"[{line}, {ground}]")
    assert before[0] != after[0]
    assert before[1] != after[1]
    browser.call("Page.reload")
    browser.wait_for("document.documentElement?.dataset.drawn === 'dark'")
    assert browser.evaluate("document.getElementById('theme').textContent") == "Light theme"
    browser.evaluate("localStorage.clear()")
    assert browser.complaints() == []


def test_a_run_is_hidden_in_all_plots_of_its_section(browser: Chromium, page: Path) -> None:
    browser.open(page, 1280, "light")
    lines = (
        "[...document.querySelectorAll('.section')].map((e) => e.querySelectorAll('.scatterlayer .trace').length)"
    )
    before = browser.evaluate(lines)
    browser.evaluate("document.querySelector('.key[data-run=\"0/1\"]').click()")
    browser.wait_for(f"({lines})[0] < {before[0]}")
    assert browser.evaluate("document.querySelectorAll('.key[aria-pressed=\"false\"]').length") > 5
    assert browser.evaluate(lines)[1] == before[1]
    assert browser.complaints() == []
