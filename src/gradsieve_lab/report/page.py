"""The report page: sections of comparable runs, in one self-contained HTML file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gradsieve._check import BadInput
from gradsieve_lab.netlab.rates import DEFAULT_RATE
from gradsieve_lab.report.lines import Plot
from gradsieve_lab.report.plots import draw_all
from gradsieve_lab.report.race import verdict
from gradsieve_lab.report.style import Shown, different, labels, styles, value
from gradsieve_lab.report.table import Table, make_table
from gradsieve_lab.report.words import sentence
from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.summary import Summary, summarise_all

MOST_FINDINGS = 3  # in the headline


@dataclass(frozen=True)
class Facts:
    """Values common to all runs, and those that differ: one column per key, one row per run."""

    common: dict[str, str]
    keys: list[str]
    rows: list[tuple[Shown, list[str]]]


@dataclass(frozen=True)
class Section:
    """Runs of the same task, data, model and number of workers."""

    thing: str  # what was trained
    title: str
    sentence: str
    virtual: bool
    table: Table
    plots: list[Plot]
    settings: Facts
    conditions: Facts
    commands: list[str]


def render(runs: Sequence[Run]) -> str:
    """Render the report page."""
    if not runs:
        raise BadInput("a report must have one run at least, got none")
    groups = _groups(runs)
    named = [labels(group) for group in groups]
    looks = styles(label for group in named for label in group)
    sections = [
        make_section([Shown(run, label, looks[label], i) for i, (run, label) in enumerate(zip(*both, strict=True))])
        for both in zip(groups, named, strict=True)
    ]
    return fill(
        "template.html.j2",
        sections,
        lead=_lead(sections, len(runs)),
        count=len(runs),
    )


def fill(template: str, sections: Sequence[Any], *, folder: Path | None = None, **more: object) -> str:
    """Render a template, from here or from `folder`, with sections, their plots and the code to draw them."""
    figures = [
        {"id": f"plot-{i}-{plot.key}", "section": i, "data": plot.data, "layout": plot.layout}
        for i, section in enumerate(sections)
        for plot in section.plots
        if plot.data
    ]
    folders = [Path(__file__).parent, *([folder] if folder else [])]
    here = Environment(loader=FileSystemLoader(folders), autoescape=True, undefined=StrictUndefined)
    here.trim_blocks = here.lstrip_blocks = True
    return here.get_template(template).render(
        sections=sections,
        figures=embedded(figures),
        plotly=Markup(_plotly()),
        css=Markup(_own("page.css")),
        script=Markup(_own("page.js")),
        **more,
    )


def make_section(shown: Sequence[Shown]) -> Section:
    """Make the section of runs that can be compared."""
    first = shown[0].run
    rows, settings = summarise_all([each.run for each in shown]), first.settings
    model = settings.get("model")
    thing = f"{settings['task']} ({model})" if model and model != settings["task"] else str(settings["task"])
    workers = settings["workers"]
    return Section(
        thing=thing,
        title=f"{thing} on {settings['dataset']}, {workers} worker{'s' if workers != 1 else ''}{_lab(settings)}",
        sentence=_finding(shown, rows).replace(" %", "\u00a0%"),
        virtual=all(row.virtual for row in rows),
        table=make_table(shown, rows, first.metric),
        plots=draw_all(shown),
        settings=_facts(shown, [each.run.settings for each in shown]),
        conditions=_facts(shown, [each.run.header.get("conditions") or {} for each in shown]),
        commands=list(dict.fromkeys(str(c) for each in shown if (c := each.run.header.get("command")))),
    )


def _finding(shown: Sequence[Shown], rows: Sequence[Summary]) -> str:
    """For runs of equal time, which was as good as plain DDP first; for others, where the best one ended."""
    runs, names = [each.run for each in shown], [each.label for each in shown]
    raced = verdict(runs, names) if all(run.settings.get("seconds") and run.end for run in runs) else ""
    return raced[:1].upper() + raced[1:] if raced else sentence(names, rows, shown[0].run.metric)


def _lab(settings: dict[str, Any]) -> str:
    hosts = settings.get("lab_hosts") or 0
    return f", {hosts} lab hosts on {settings.get('lab_rate') or DEFAULT_RATE} links" if hosts else ""


def embedded(data: object) -> Markup:
    """JSON for a script element: nothing in it can end the element or start another."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


def _groups(runs: Sequence[Run]) -> list[list[Run]]:
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        alike = tuple(
            value(run.settings.get(key)) for key in ("task", "dataset", "model", "workers", "lab_hosts", "lab_rate")
        )
        groups.setdefault((*alike, run.metric.name), []).append(run)
    return list(groups.values())


def _facts(shown: Sequence[Shown], each: Sequence[dict[str, Any]]) -> Facts:
    keys = different(each)
    common = {key: value(inner) for key, inner in each[0].items() if key not in keys}
    return Facts(
        common, keys, [(s, [value(facts.get(key)) for key in keys]) for s, facts in zip(shown, each, strict=True)]
    )


def _lead(sections: Sequence[Section], runs: int) -> list[str]:
    """The findings; of many sections only the titles, as each shows its own finding."""
    if len(sections) <= MOST_FINDINGS:
        several = len(sections) > 1
        return [f"{section.thing}: {section.sentence}" if several else section.sentence for section in sections]
    titles = "; ".join(section.title for section in sections)
    return [f"{runs} runs in {len(sections)} settings, each compared separately: {titles}."]


def _own(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _plotly() -> str:
    """plotly.js from the plotly package."""
    text = (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    return text.replace("</script", "<\\/script")
