"""The page is one file, says what the records say, and runs nothing that they hold."""

import csv
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import four_runs, make_run

from gradsieve_lab.report import page, render, write_csv, write_report

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \"quoted\" 'too' \u2028 {{ 7 * 7 }}"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Five megabytes of plotly.js belong into one test only."""
    if "whole" not in request.node.name:
        monkeypatch.setattr(page, "_plotly", lambda: "/* plotly */")


class Reader(HTMLParser):
    """The elements with their attributes, and the text of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def figures(text: str) -> list[dict[str, object]]:
    found = re.search(r'<script id="figures" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found
    return list(json.loads(found[1]))


def test_the_whole_page_needs_nothing_else() -> None:
    text = render(four_runs())
    own = text.replace(page._plotly(), "")
    assert len(own) < len(text) - 1_000_000
    assert not re.search(r"https?://|@import|url\(", own)
    assert not [attributes for _, attributes in Reader(own).elements if attributes.get("src")]
    assert "default-src 'none'" in own


def test_what_the_page_holds() -> None:
    text = render(four_runs())
    read = Reader(text)
    assert read.all("html") == [{"lang": "en"}]
    assert "times fewer bytes" in read.text
    assert len(read.all("h1")) == len(read.all("h2")) == 1
    assert len(read.all("caption")) == len(read.all("table")) == 2
    assert all(attributes.get("scope") for attributes in read.all("th"))
    drawn = [attributes for attributes in read.all("div") if attributes.get("class") == "canvas"]
    assert [attributes["id"] for attributes in drawn] == [figure["id"] for figure in figures(text)]
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in drawn)
    for said in ("AMD EPYC 7B13", "2.9.0+cpu", "2026-11-15", "gradsieve compare mlp", "weight_decay"):
        assert said in read.text


def test_records_cannot_bring_code() -> None:
    run = make_run(HOSTILE, steps=3, dataset=HOSTILE, options={HOSTILE: HOSTILE})
    metric = {"name": HOSTILE, "higher_is_better": True, "percent": True}
    header = {**run.header, "command": HOSTILE, "metric": metric, "conditions": {HOSTILE: HOSTILE}}
    text = render([replace(run, header=header), make_run("dense", steps=3, dataset=HOSTILE)])
    plain = Reader(render(four_runs(steps=3)))
    read = Reader(text)
    assert len(read.all("script")) == len(plain.all("script"))
    assert not read.all("img")
    assert not [attributes for _, attributes in read.elements if any(key.startswith("on") for key in attributes)]
    assert "{{ 7 * 7 }}" in read.text
    assert figures(text)


def test_embedded_json_cannot_end_its_element() -> None:
    text = page.embedded({"name": HOSTILE})
    assert "<" not in text
    assert ">" not in text
    assert "\u2028" not in text
    assert json.loads(text) == {"name": HOSTILE}


def test_sections_for_what_cannot_be_compared() -> None:
    runs = [*four_runs(steps=30), make_run("dense", steps=30, workers=8), make_run("topk", steps=30, task="lm")]
    text = render(runs)
    assert len(Reader(text).all("section")) == 3
    assert "6 runs in 3 settings" not in text, "a few findings are all shown"
    several = render([*runs, make_run("dense", steps=30, task="bert")])
    assert "7 runs in 4 settings, each compared separately: " in several
    assert {figure["section"] for figure in figures(text)} == {0, 1, 2}
    colours = {
        line["meta"]["light"]
        for figure in figures(text)
        for line in figure["data"]
        if line["name"] == "topk"  # type: ignore[attr-defined]
    }
    assert len(colours) == 1


def test_settings_that_differ_stand_in_a_table() -> None:
    found = page.make_section(_shown([make_run("exdyna", lr=0.1), make_run("topk", lr=0.2)]))
    assert found.settings.keys == ["sparsifier", "lr"]
    assert found.settings.rows[1][1] == ["topk", "0.2"]
    assert "lr" not in found.settings.common
    assert found.settings.common["batch"] == "16"
    assert found.conditions.keys == []


def _shown(runs: list[page.Run]) -> list[page.Shown]:
    return [page.Shown(run, run.name, page.styles([run.name])[run.name], i) for i, run in enumerate(runs)]


def test_virtual_workers_are_said_to_be() -> None:
    assert "took turns in one process" in render([make_run(steps=2, virtual=True)])
    assert "took turns in one process" not in render([make_run(steps=2)])


def test_empty_cases() -> None:
    text = render([replace(make_run(), steps=[], metrics=[], end=None)])
    assert text.count("Left out:") == 10
    assert figures(text) == []
    with pytest.raises(ValueError, match="one run at least"):
        render([])


def test_the_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "new" / "report.html"
    write_report([make_run(steps=3)], out)
    before = out.read_text()
    assert before.startswith("<!doctype html>")
    assert before.rstrip().endswith("</html>")

    def broken(self: Path, target: Path) -> Path:
        raise OSError(28, "no space left")

    monkeypatch.setattr(Path, "replace", broken)
    with pytest.raises(ValueError, match="no space left"):
        write_report(four_runs(steps=3), out)
    assert out.read_text() == before
    assert list(out.parent.iterdir()) == [out]


def test_the_tables_for_those_who_go_on(tmp_path: Path) -> None:
    write_csv([make_run("exdyna", steps=50), make_run("topk, quoted", steps=10)], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps.csv", "summary.csv"]
    with (tmp_path / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["exdyna", "topk, quoted"]
    assert {"metric_best", "compression", "end"} <= set(rows[0])
    with (tmp_path / "steps.csv").open() as file:
        steps = list(csv.DictReader(file))
    assert len(steps) == 51 + 11  # the metric before the first step has a line of its own
    assert [row["steps_done"] for row in steps if row["run"] == "exdyna" and row["metric"]] == ["0", "25", "50"]
    assert float(steps[1]["forward_seconds"]) > 0


def test_the_gain_kept_is_in_the_page_and_in_the_csv(tmp_path: Path) -> None:
    runs = [*four_runs(), make_run("alone", final=0.9)]
    assert re.search(r">gain kept<", render(runs))
    assert not re.search(r">gain kept<", render(four_runs()))
    write_csv(runs, tmp_path)
    kept = {row["run"]: row["gain_kept"] for row in csv.DictReader((tmp_path / "summary.csv").open())}
    assert (float(kept["dense"]), float(kept["alone"])) == (1, 0)
    assert float(kept["exdyna"]) > 0
