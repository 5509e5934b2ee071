"""The command line: `gradsieve demo | bench | info`."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gradsieve._check import at_least, fraction
from gradsieve.bench.timing import Row, write_csv
from gradsieve.conditions import conditions

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, help=__doc__
)
bench_app = typer.Typer(
    no_args_is_help=True, help="Measure speed and memory; writes rows, compares within one run."
)
app.add_typer(bench_app, name="bench")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines, nothing else.")]


def main() -> None:
    """The console script."""
    app()


@app.command()
def demo(
    workers: Annotated[int, typer.Option(help="How many virtual workers.")] = 8,
    steps: Annotated[int, typer.Option(help="Training steps for each sparsifier.")] = 150,
    density: Annotated[float, typer.Option(help="Fraction of the gradient to send, in (0, 1].")] = 0.01,
    sparsifiers: Annotated[str, typer.Option(help="Names, separated by commas; default: all.")] = "",
    seed: Annotated[int, typer.Option(help="Same seed, same result.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train a small network with every sparsifier on virtual workers, and compare."""
    from gradsieve.experiments.demo import Settings, compare, load_digits
    from gradsieve.sparsifiers import SPARSIFIERS, make_sparsifier

    with _clear_errors():
        settings = Settings(workers, steps, density, seed)
        load_digits(workers, seed)
        names = [name.strip() for name in sparsifiers.split(",")] if sparsifiers else list(SPARSIFIERS)
        for name in names:
            make_sparsifier(name)
    with _progress(hidden=as_json) as progress:
        task = progress.add_task("", total=len(names) * steps)

        def advance(name: str, step: int) -> None:
            progress.update(task, description=name, completed=names.index(name) * steps + step)

        results = compare(names, settings, advance)
    if as_json:
        _print_json(
            {
                "settings": asdict(settings),
                "results": [asdict(r) for r in results],
                "conditions": conditions(),
            }
        )
        return
    table = _table(
        f"{workers} virtual workers, {steps} steps, density {density:g} asked",
        ["sparsifier"],
        ["accuracy", "density", "worst", "imbalance", "kB a step", "select ms"],
    )
    for r in results:
        table.add_row(
            r.sparsifier,
            f"{r.accuracy:.1%}",
            f"{r.density:.4f}",
            f"{r.worst_density:.4f}",
            f"{r.imbalance:.2f}",
            f"{r.ring_kilobytes:,.1f}",
            f"{r.select_ms:.2f}",
        )
    console = Console(width=80)
    console.print(table)
    console.print(
        "Images: scikit-learn's digits. Network: 167,178 parameters. density: fraction of "
        "the gradient sent, mean of all steps and the worst one. imbalance: picks of the "
        "busiest worker against the mean. kB a step: what a worker puts on the wire with "
        "ring collectives. select ms: accumulating and selecting, the slowest worker.",
        highlight=False,
    )


@bench_app.command()
def kernels(
    n: Annotated[int, typer.Option("--n", help="Elements of the gradient.")] = 25_000_000,
    repeats: Annotated[int, typer.Option(help="Repetitions; medians are reported.")] = 15,
    out: Annotated[Path | None, typer.Option(help="Write the rows to this CSV file.")] = None,
    as_json: AsJson = False,
) -> None:
    """The kernels and a whole step of one worker against passes over the same memory."""
    from gradsieve.bench.kernels import bench_kernels

    with _clear_errors():
        at_least("n", n, 1_000_000)
        at_least("repeats", repeats, 1)
        _check_out(out)
    with _progress(hidden=as_json) as progress:
        task = progress.add_task("", total=None)

        def advance(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        rows = bench_kernels(n, repeats, advance)
    if _deliver(rows, out, as_json):
        return
    _print_rows(rows, f"n = {n:,} float32, one thread, medians of {repeats}")
    Console(width=80).print(
        "ratio: to x.sum() for kernels that read (and once to torch.where), to "
        "residual.add_(grad) for those that accumulate and for the step, to P = 1 for the "
        "selection, to n floats for the memory.\n" + _foot(),
        highlight=False,
    )


@bench_app.command()
def step(
    workers: Annotated[str, typer.Option(help="Numbers of processes, separated by commas.")] = "4,2",
    density: Annotated[float, typer.Option(help="Fraction of the gradient to send, in (0, 1].")] = 0.001,
    repeats: Annotated[int, typer.Option(help="Steps of each case; medians are reported.")] = 30,
    out: Annotated[Path | None, typer.Option(help="Write the rows to this CSV file.")] = None,
    as_json: AsJson = False,
) -> None:
    """A DDP step of 10.5M parameters over gloo on loopback: ours, plain DDP, torch's own hooks."""
    from gradsieve.bench.step import bench_memory, bench_step

    with _clear_errors():
        fraction("density", density)
        at_least("repeats", repeats, 1)
        numbers = [at_least("workers", _whole("workers", part), 1) for part in workers.split(",")]
        _check_out(out)
    rows = []
    with _progress(hidden=as_json) as progress:
        task = progress.add_task("", total=len(numbers))
        for number in numbers:
            progress.update(task, description=f"{number} processes")
            rows += bench_step(number, density, repeats)
            progress.advance(task)
        rows.append(bench_memory(min(numbers), density))
    if _deliver(rows, out, as_json):
        return
    _print_rows(rows, f"10 linear layers of 1024, batch 32, loopback, medians of {repeats} steps")
    Console(width=80).print(
        "ratio: to plain DDP with as many processes (P); memory in float32 copies of the model.\n" + _foot(),
        highlight=False,
    )


@app.command()
def info(as_json: AsJson = False) -> None:
    """Versions, machine, and the sparsifiers with their options."""
    from gradsieve.sparsifiers import SPARSIFIERS, make_sparsifier

    known = {name: make_sparsifier(name).options() for name in SPARSIFIERS}
    if as_json:
        _print_json({"conditions": conditions(), "sparsifiers": known})
        return
    console = Console(width=80, highlight=False)
    for name, value in conditions().items():
        console.print(f"{name:<12}{value}")
    console.print("sparsifiers")
    for name, options in known.items():
        console.print(f"  {name:<16}" + ", ".join(f"{key}={value!r}" for key, value in options.items()))


@contextmanager
def _clear_errors() -> Iterator[None]:
    """Bad input, checked inside, ends in one sentence and exit code 2; a traceback is for our own mistakes."""
    try:
        yield
    except (ValueError, TypeError) as error:
        _refuse(str(error))


def _refuse(sentence: str) -> NoReturn:
    typer.echo(f"gradsieve: {sentence}", err=True)
    raise typer.Exit(2)


def _progress(hidden: bool) -> Progress:
    columns = (TextColumn("{task.description:<26}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=hidden, transient=True)


def _deliver(rows: list[Row], out: Path | None, as_json: bool) -> bool:
    """Write the rows where they are wanted; says whether nothing else is to be printed."""
    if out is not None:
        write_csv(rows, out)
    if as_json:
        _print_json({"rows": [asdict(row) for row in rows], "conditions": conditions()})
    return as_json


def _check_out(out: Path | None) -> None:
    if out is not None and out.is_dir():
        raise ValueError(f"out must be a file, got the folder {out}")


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {text!r}") from None


def _print_rows(rows: list[Row], title: str) -> None:
    table = _table(title, ["case", "d", "P"], ["median", "ratio", "goal", "met"])
    for row in rows:
        unit = " ms" if row.unit == "ms" else ""
        figures = (f"{row.median:.2f}{unit}", f"{row.ratio:.2f}", row.goal, row.met)
        table.add_row(row.case, f"{row.density:g}", str(row.workers), *figures)
    Console(width=80).print(table)


def _table(title: str, words: list[str], figures: list[str]) -> Table:
    """A table for 80 columns: words to the left, figures to the right."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in words:
        table.add_column(heading, no_wrap=True)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _foot() -> str:
    return ", ".join(f"{name} {value}" for name, value in conditions().items())


def _print_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")
