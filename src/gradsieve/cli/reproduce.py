"""Run an experiment and judge it.

Example: gradsieve reproduce density-control --quick
"""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from gradsieve._check import BadInput
from gradsieve._files import write_whole
from gradsieve.cli.common import AsJson, clear_errors, console, foot, print_json, refuse, table
from gradsieve.cli.live import live
from gradsieve.experiments import running
from gradsieve.experiments.reproduce import density_control
from gradsieve.experiments.reproduce.density_control import Claim, Row
from gradsieve.report import write_report
from gradsieve.tasks.base import Metric

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=__doc__)


@app.callback()
def main() -> None:
    """Run an experiment and judge it."""


@app.command("density-control")
def density(
    out: Annotated[Path, typer.Option(help="Folder of the records; runs in it are not repeated.")] = Path(
        "runs/density-control"
    ),
    only: Annotated[list[str] | None, typer.Option("--only", help="A case, such as mlp; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="60 steps, one seed, small cases: 3 minutes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Density at every step, and what a budget buys (40 minutes on 2 cores).

    Example: gradsieve reproduce density-control --only mlp --only ncf
    """
    with clear_errors():
        density_control.plan(only or [], quick)
        if out.is_file():
            raise ValueError(f"out must be a folder, got the file {out}")
    stop = running.Stop()
    with live(Metric("metric", True), hidden=as_json) as listen, stop.watching():
        try:
            runs = density_control.collect(only or [], quick, out, listen, stop)
        except BadInput as error:
            refuse(str(error))
    rows = density_control.rows_of(runs)
    claims = density_control.judge(rows)
    found = {"rows": [dataclasses.asdict(row) for row in rows], "claims": [dataclasses.asdict(c) for c in claims]}
    if rows:
        write_report([each[0] for each in runs.values()], out / "report.html")
        write_whole(out / "density-control.json", json.dumps(found, indent=2) + "\n")
    if as_json:
        print_json(found)
    else:
        _print(rows, claims, out)
    if stop.signal:
        raise typer.Exit(128 + stop.signal)
    if not all(claim.holds for claim in claims):
        raise typer.Exit(1)


def _print(rows: list[Row], claims: list[Claim], out: Path) -> None:
    made = table("density control", ["case", "method"], ["metric", "loss", "error", "sent", "within 5 %", "bytes"])
    for row in rows:
        error = "" if row.total_error is None else f"{row.total_error:.3g}"
        figures = (f"{row.metric:.4g}", f"{row.loss:.3g}", error, f"{row.sent:.3f}", f"{row.within_5pct:.0%}")
        made.add_row(row.case, row.method, *figures, f"{row.bytes_per_step:,.0f}")
    console().print(made)
    for claim in claims:
        console().print(f"{'holds' if claim.holds else 'DOES NOT HOLD'}: {claim.claim}: {claim.found}")
    console().print(f"{foot()}\nreport: {out / 'report.html'}")
