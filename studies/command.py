"""The command that reruns the papers' experiments and judges their claims."""

import dataclasses
import functools
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from gradsieve._check import BadInput, one_of
from gradsieve_lab.cli.common import AsJson, clear_errors, console, foot, print_json, table
from gradsieve_lab.cli.live import watched
from gradsieve_lab.runs import running
from gradsieve_lab.tasks.base import Metric
from studies.page import write_findings
from studies.reproduce import EXPERIMENTS, density_control
from studies.reproduce.base import OURS, REPRODUCED
from studies.reproduce.outcomes import Outcome, carry_out, read_outcomes
from studies.reproduce.shelf import Interrupted, Shelf

CASED = density_control.EXPERIMENT.id  # the experiment with cases
_QUICK_MINUTES = 10


def reproduce(
    ids: Annotated[list[str], typer.Argument(metavar="ID", help="Experiments; or all; or list.")],
    quick: Annotated[bool, typer.Option("--quick", help="Smaller: all in 10 minutes.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder; default: runs/reproduce or runs/reproduce-quick.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help=f"A case of {CASED}, such as mlp; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Regenerate the papers' claims, each with a verdict.

    Finished runs in the folder are not repeated: after an interruption the same
    command continues. Exit code 0 only if everything was reproduced.

    Example: python -m studies fig1a fig1c --quick
    """
    with clear_errors():
        if ids == ["list"]:
            _list(as_json)
            return
        chosen = _chosen(ids)
        for case in only or []:
            one_of("case", case, density_control.CASES)
        if only and chosen != [CASED]:
            raise BadInput(f"only is for {CASED} alone, got {', '.join(chosen)}")
        out = out or Path("runs") / ("reproduce-quick" if quick else "reproduce")
        if out.is_file():
            raise BadInput(f"out must be a folder, got the file {out}")
        for before in read_outcomes(out, list(EXPERIMENTS)):
            if before.quick != quick:
                kind = "quick ones" if before.quick else "full ones"
                raise BadInput(f"out must hold outcomes of one kind, got {out}, which has {kind}: name another")
    stop, outcomes = running.Stop(), []
    with watched(Metric("metric", True), stop, hidden=as_json, brief=True) as listen:
        shelf = Shelf(out, quick, listen, stop)
        for name in chosen:
            experiment = EXPERIMENTS[name]
            typer.echo(f"{name}: {_time(experiment.minutes, quick)}", err=True)
            if only:
                experiment = dataclasses.replace(experiment, run=functools.partial(density_control.run, only=only))
            try:
                outcomes.append(carry_out(experiment, shelf))
            except Interrupted:
                break
            write_findings(read_outcomes(out, list(EXPERIMENTS)), out / "page.html")
    if as_json:
        print_json([outcome.as_dict() for outcome in outcomes])
    else:
        _print(outcomes, out)
    if stop.signal:
        typer.echo("stopped; the same command goes on where it was", err=True)
        raise typer.Exit(128 + stop.signal)
    if any(outcome.finding.verdict != REPRODUCED for outcome in outcomes):
        raise typer.Exit(1)


def _chosen(ids: list[str]) -> list[str]:
    """In the order of the registry, each once; `all` is every experiment of the papers."""
    known = [*EXPERIMENTS, "all", "list"]
    wanted = {one_of("experiment", name, known) for name in ids}
    if "list" in wanted:
        raise BadInput(f"list must stand alone, got {', '.join(ids)}")
    return [
        name for name in EXPERIMENTS if name in wanted or ("all" in wanted and EXPERIMENTS[name].source != OURS)
    ]


def _time(minutes: float, quick: bool) -> str:
    if quick:
        return f"quick: at most {_QUICK_MINUTES} minutes for all"
    return f"about {minutes:g} minute{'s' if minutes != 1 else ''} on 2 cores"


def _list(as_json: bool) -> None:
    if as_json:
        facts = ("id", "source", "claim", "minutes")
        print_json([{name: getattr(each, name) for name in facts} for each in EXPERIMENTS.values()])
        return
    made = table("experiments", ["id", "from", "claim"], ["minutes"])
    for each in EXPERIMENTS.values():
        made.add_row(each.id, each.source, each.claim, f"{each.minutes:g}")
    console().print(made)


def _print(outcomes: list[Outcome], out: Path) -> None:
    screen = console()
    for outcome in outcomes:
        screen.print(f"\n{outcome.id}: {outcome.finding.verdict}", style="bold")
        screen.print(textwrap.fill(outcome.claim, 80))
        for check in outcome.finding.checks:
            words = f"{'holds' if check.holds else 'FAILS'}: {check.criterion}: {check.found}"
            screen.print(textwrap.fill(words, 80, initial_indent="  ", subsequent_indent="    "))
        if outcome.finding.note:
            screen.print(textwrap.fill(outcome.finding.note, 80, initial_indent="  ", subsequent_indent="  "))
    if outcomes:
        done = sum(outcome.finding.verdict == REPRODUCED for outcome in outcomes)
        checks = [check.holds for outcome in outcomes for check in outcome.finding.checks]
        screen.print(f"\n{done} of {len(outcomes)} reproduced, {sum(checks)} of {len(checks)} criteria hold")
        screen.print(f"{foot()}\npage: {out / 'page.html'}", soft_wrap=True)
