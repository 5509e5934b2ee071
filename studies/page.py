"""The page of experiments: the claim, criteria, figures and conditions of each, in one HTML file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradsieve._check import BadInput
from gradsieve_lab._files import write_whole
from gradsieve_lab.conditions import in_words
from gradsieve_lab.report.lines import Entry, Plot, axes, draw
from gradsieve_lab.report.page import fill
from gradsieve_lab.report.style import Style, styles
from studies.reproduce.base import REPRODUCED, SOURCES, Check, Figure, Grid
from studies.reproduce.outcomes import Outcome


@dataclass(frozen=True)
class Told:
    """One experiment as the page shows it."""

    id: str
    claim: str
    source: str
    paper: str
    verdict: str
    reproduced: bool
    note: str
    checks: list[Check]
    plots: list[Plot]
    tables: list[Grid]
    conditions: str


def write_findings(outcomes: Sequence[Outcome], out: Path) -> None:
    """Write the page, whole or not at all."""
    write_whole(out, render_findings(outcomes))


def render_findings(outcomes: Sequence[Outcome]) -> str:
    """The page as HTML."""
    if not outcomes:
        raise BadInput("a page must have one experiment at least, got none")
    sections = [_told(outcome) for outcome in outcomes]
    done = sum(told.reproduced for told in sections)
    holds = [check.holds for told in sections for check in told.checks]
    kind = "smaller " if outcomes[0].quick else ""
    many = f"{len(sections)} {kind}experiment{'s' if len(sections) != 1 else ''}"
    lead = f"{done} of {many} reproduced all that is claimed; {sum(holds)} of {len(holds)} criteria hold."
    return fill("findings.html.j2", sections, folder=Path(__file__).parent, lead=lead)


def _told(outcome: Outcome) -> Told:
    finding = outcome.finding
    labels = dict.fromkeys(line.label for figure in finding.figures for line in figure.lines)
    looks, places = styles(labels), {label: i for i, label in enumerate(labels)}
    return Told(
        id=outcome.id,
        claim=outcome.claim,
        source=outcome.source,
        paper=SOURCES[outcome.source],
        verdict=finding.verdict,
        reproduced=finding.verdict == REPRODUCED,
        note=finding.note,
        checks=finding.checks,
        plots=[plot_of(figure, looks, places) for figure in finding.figures],
        tables=finding.tables,
        conditions=f"{outcome.command} ({in_words(outcome.conditions)})",
    )


def plot_of(figure: Figure, looks: dict[str, Style], places: dict[str, int]) -> Plot:
    layout = axes(figure.x, figure.y, log_x=figure.log_x, log_y=figure.log_y)
    empty = Plot(figure.key, figure.title, figure.about, layout=layout, missing="there is no point to draw")
    entries = (
        Entry(line.label, looks[line.label], places[line.label], zip(line.x, line.y, strict=True))
        for line in figure.lines
    )
    return draw(empty, entries)
