"""`gradsieve bench`: speed and memory."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gradsieve._check import BadInput, at_least, fraction
from gradsieve_lab.bench.timing import Row, write_csv
from gradsieve_lab.cli.common import AsJson, check_out, clear_errors, console, foot, print_json, table
from gradsieve_lab.conditions import conditions
from gradsieve_lab.netlab.rates import DEFAULT_RATE, parse_links
from gradsieve_lab.netlab.rootless import enter_lab

app = typer.Typer(
    no_args_is_help=True,
    help="""Measure speed and memory.

    Example: gradsieve bench step --workers 2 --repeats 10""",
)
Cases = Annotated[
    str, typer.Option(help='Cases to run, as in "plain DDP; share, delay=1; compute alone"; default: all.')
]
Repeats = Annotated[int, typer.Option(help="Repetitions; medians are reported.")]
Out = Annotated[Path | None, typer.Option(help="Write the rows to this CSV file.")]


@app.command()
def kernels(
    n: Annotated[int, typer.Option("--n", help="Elements of the gradient.")] = 25_000_000,
    repeats: Repeats = 15,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Compare kernels and a whole step to passes over memory.

    Example: gradsieve bench kernels --n 5000000
    """
    from gradsieve_lab.bench.kernels import bench_kernels

    with clear_errors():
        at_least("n", n, 1_000_000)
        at_least("repeats", repeats, 1)
        check_out(out)
    with _progress(hidden=as_json) as progress:
        task = progress.add_task("", total=None)

        def advance(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        rows = bench_kernels(n, repeats, advance)
    if _deliver(rows, out, as_json):
        return
    _print_rows(rows, f"n = {n:,} float32, one thread, medians of {repeats}")
    console().print(
        "ratio: to x.sum() for kernels that read (and once to torch.where), to "
        "residual.add_(grad) for those that accumulate and for the step, to P = 1 for the "
        "selection, to n floats for the memory.\n" + foot()
    )


@app.command()
def step(
    workers: Annotated[str, typer.Option(help="Numbers of processes, separated by commas.")] = "4,2",
    density: Annotated[float, typer.Option(help="Fraction of the gradient to send, in (0, 1].")] = 0.001,
    repeats: Repeats = 30,
    cases: Cases = "",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time a DDP step on loopback: ours, plain, torch's hooks.

    The model has 10.5M parameters; the processes communicate over gloo.

    Example: gradsieve bench step --workers 2 --out step.csv
    """
    from gradsieve_lab.bench.cases import ALONE, LATE, OURS, PLAIN, parse_cases
    from gradsieve_lab.bench.step import bench_memory, bench_step

    with clear_errors():
        fraction("density", density)
        at_least("repeats", repeats, 1)
        numbers = [at_least("workers", _whole("workers", part), 1) for part in workers.split(",")]
        chosen = parse_cases(cases, PLAIN, ALONE)
        check_out(out)
    rows = []
    with _progress(hidden=as_json) as progress:
        task = progress.add_task("", total=len(numbers))
        for number in numbers:
            progress.update(task, description=f"{number} processes")
            rows += bench_step(number, density, repeats, chosen)
            progress.advance(task)
        rows += [bench_memory(min(numbers), density, case) for case in (OURS, LATE) if case in chosen]
    if _deliver(rows, out, as_json):
        return
    _print_rows(rows, f"10 linear layers of 1024, batch 32, loopback, medians of {repeats} steps")
    console().print(
        "ratio: to plain DDP with the same P (processes); memory in float32 copies of the model.\n" + foot()
    )


@app.command()
def lab(
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 4,
    rates: Annotated[str, typer.Option(help="Link rates, separated by commas.")] = "1gbit,100mbit,20mbit",
    density: Annotated[float, typer.Option(help="Fraction of the gradient to send, in (0, 1].")] = 0.001,
    repeats: Repeats = 15,
    cases: Cases = "",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time a DDP step between hosts with slow links (Linux).

    Slow cases are repeated less often, at least three times.

    Example: gradsieve bench lab --rates 100mbit --repeats 10
    """
    from gradsieve_lab.bench.cases import ALONE, PLAIN, parse_cases
    from gradsieve_lab.bench.lab import bench_lab

    with clear_errors():
        fraction("density", density)
        at_least("repeats", repeats, 1)
        wanted = rates.split(",")
        for rate in wanted:
            parse_links(rate, hosts)
        chosen = parse_cases(cases, PLAIN, ALONE)
        check_out(out)
        enter_lab()
    rows = []
    with _progress(hidden=as_json) as progress:
        task = progress.add_task("", total=len(wanted))
        for rate in wanted:

            def show(what: str, rate: str = rate) -> None:
                progress.update(task, description=f"{rate}: {what}")

            show("starting")
            rows += bench_lab(hosts, rate, density, repeats, show, chosen)
            progress.advance(task)
    if _deliver(rows, out, as_json):
        return
    for rate in wanted:
        here = [row for row in rows if row.links == rate]
        _print_rows(here, f"{hosts} hosts, {rate} links, 10.5M parameters, medians of {repeats} steps")
    console().print("ratio: to compute alone\n" + foot())


@app.command()
def wire(
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 4,
    density: Annotated[float, typer.Option(help="Fraction of the gradient to send, in (0, 1].")] = 0.001,
    steps: Annotated[int, typer.Option(help="Steps to count.")] = 30,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Measure bytes per element sent (Linux).

    Example: gradsieve bench wire --density 0.01
    """
    from gradsieve_lab.bench.wire import bench_wire

    with clear_errors():
        fraction("density", density)
        at_least("steps", steps, 1)
        parse_links(DEFAULT_RATE, hosts)
        check_out(out)
        enter_lab()
    rows = bench_wire(hosts, density, steps)
    if _deliver(rows, out, as_json):
        return
    _print_rows(rows, f"bytes sent per worker and selected element, {hosts} hosts")
    console().print(
        "metered: by our own meter. counted: by the interfaces, without Ethernet, IP and TCP "
        "headers; ratio to metered.\n" + foot()
    )


def _progress(hidden: bool) -> Progress:
    columns = (TextColumn("{task.description:<26}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=hidden, transient=True)


def _deliver(rows: list[Row], out: Path | None, as_json: bool) -> bool:
    """Write the rows to a file, and as JSON if wanted; returns whether to print nothing else."""
    if out is not None:
        with clear_errors():
            write_csv(rows, out)
    if as_json:
        print_json({"rows": [asdict(row) for row in rows], "conditions": conditions()})
    return as_json


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadInput(f"{name} must be a whole number, got {text!r}") from None


def _print_rows(rows: list[Row], title: str) -> None:
    made = table(title, ["case", "d", "P"], ["median", "ratio"])
    for row in rows:
        unit = " ms" if row.unit == "ms" else ""
        made.add_row(row.case, f"{row.density:g}", str(row.workers), f"{row.median:.2f}{unit}", f"{row.ratio:.2f}")
    console().print(made)
