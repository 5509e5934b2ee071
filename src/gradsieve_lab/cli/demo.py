"""`gradsieve demo`: five methods on two models, over 100 Mbit/s links between four hosts on this machine."""

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import typer

from gradsieve._check import BadInput
from gradsieve_lab.cli.common import AsJson, check_folder, clear_errors, console, new_folder, print_json, table
from gradsieve_lab.cli.dashboard import dashboard
from gradsieve_lab.cli.live import COLUMNS, clear_failures
from gradsieve_lab.netlab.rates import parse_links
from gradsieve_lab.netlab.rootless import enter_lab
from gradsieve_lab.report import write_csv, write_report
from gradsieve_lab.report.race import at_step, verdict
from gradsieve_lab.report.table import duration, size
from gradsieve_lab.runs import comparing
from gradsieve_lab.runs.methods import DENSE, Method, parse_method
from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.running import Stop
from gradsieve_lab.runs.settings import Settings
from gradsieve_lab.runs.summary import summarise, summarise_all
from gradsieve_lab.tasks import TASKS

_HOSTS = 4
_MANY = 100_000  # steps: more than the time allows
_WARM_UP = 10 / _MANY
# As docs/share.md advises: fp8 values, as many bytes as exdyna's float32, sent while computing.
_SHARE = "share:density=0.027:values=fp8:delay=1"
# The same bytes in fewer messages: for a model this small, a round costs more time than its bytes.
_SHARE_RARELY = "share:density=0.1:every=4:values=fp8:delay=1"


@dataclass(frozen=True)
class Part:
    """One model and its methods, by their labels in the table."""

    name: str
    title: str
    settings: dict[str, Any]
    methods: dict[str, str]


PARTS = (
    Part(
        "gpt",
        "A small GPT on Python's own source text, AdamW",
        {"task": "gpt", "batch": 4},
        {
            "dense": "dense",
            "fp16": "fp16",
            "powersgd": "powersgd",
            "exdyna": "exdyna",
            "share": f"{_SHARE_RARELY}:noise=averaged",
        },
    ),
    Part(
        "images",
        "A small CNN on handwritten digits, SGD with momentum",
        {"task": "cnn", "width": 4.0, "batch": 8},
        {"dense": "dense", "fp16": "fp16", "powersgd": "powersgd", "exdyna": "exdyna", "share": _SHARE},
    ),
)


def demo(
    seconds: Annotated[float, typer.Option(help="Training time of each of the ten runs.")] = 13.0,
    rate: Annotated[str, typer.Option(help="Rate of the links between the four hosts.")] = "100mbit",
    loopback: Annotated[bool, typer.Option("--loopback", help="Use loopback instead of slow links.")] = False,
    seed: Annotated[int, typer.Option(help="Same seed, same start.")] = 0,
    out: Annotated[Path | None, typer.Option(help="A new folder; default: one below runs/.")] = None,
    as_json: AsJson = False,
) -> None:
    """See the gain: five methods over slow links, 4 minutes.

    Four hosts on this machine train a small GPT and an image model for the same time with plain DDP, torch's fp16
    and PowerSGD hooks, ExDyna on gradients, and shared weights. Nothing is downloaded.

    Example: gradsieve demo --rate 20mbit
    """
    with clear_errors():
        parse_links(rate, _HOSTS)
        if seconds <= 0:
            raise BadInput(f"seconds must be positive, got {seconds:g}")
        folder = check_folder(out or new_folder("demo"))
        why = "you asked for it" if loopback else _lab_problem()
        common: dict[str, Any] = {
            "workers": _HOSTS,
            "steps": _MANY,
            "seconds": seconds,
            "warm_up": _WARM_UP,
            "decay": "constant",
        }
        common |= {"seed": seed, "save": False} | ({} if why else {"lab_hosts": _HOSTS, "lab_rate": rate})
        parts = [(part, Settings(**part.settings, **common)) for part in PARTS]
    place = f"{_HOSTS} hosts on {rate} links" if not why else f"{_HOSTS} processes on loopback"
    if not as_json:
        typer.echo(f"{place}, {duration(seconds)} of training for each of ten runs")
        if why:
            typer.echo(f"No slow links here: {why}. On loopback sending less saves little time.")
    stop, done = Stop(), []
    with stop.watching(), clear_failures():
        for part, settings in parts:
            if not stop.requested():
                done.append((part, _run(part, settings, folder / part.name, stop, as_json)))
    _finish([(part, runs) for part, runs in done if runs], folder, as_json, stop)


def _lab_problem() -> str:
    """Why the lab cannot run on this machine; empty if it can."""
    try:
        enter_lab()
    except BadInput as problem:
        return str(problem)
    return ""


def _run(part: Part, settings: Settings, folder: Path, stop: Stop, as_json: bool) -> list[Run]:
    methods = [_method(label, text, settings) for label, text in part.methods.items()]
    metric = TASKS[settings.task].METRIC
    with dashboard(part.title, metric, [method.label for method in methods], hidden=as_json) as listen:
        return comparing.compare(settings, methods, folder, listen, stop)


def _method(label: str, text: str, settings: Settings) -> Method:
    return replace(parse_method(text, settings.density), label=label)


def _finish(done: list[tuple[Part, list[Run]]], folder: Path, as_json: bool, stop: Stop) -> None:
    page, runs = folder / "report.html", [run for _, found in done for run in found]
    if runs:
        with clear_errors():
            write_report(runs, page)
            write_csv(runs, folder)
    if as_json:
        print_json([dataclasses.asdict(row) for _, found in done for row in summarise_all(found)])
    else:
        for part, found in done:
            _print_part(part, found)
        if runs and not stop.signal:
            for part, found in done:
                said = verdict(found, [run.name for run in found])
                if said:
                    typer.echo(fill(f"{part.title.split(',')[0]}: {said}", COLUMNS) + "\n")
            typer.echo("As good: within 1 % of plain DDP's last value, or one point of accuracy.")
        if runs:
            typer.echo(f"report: {page.resolve().as_uri()}")
    if stop.signal:
        typer.echo("stopped; a demo cannot be resumed, start again with: gradsieve demo", err=True)
        raise typer.Exit(128 + stop.signal)


def _print_part(part: Part, runs: list[Run]) -> None:
    """Print quality at equal time and at equal steps, and bytes and time per step."""
    metric, dense = runs[0].metric, next((run for run in runs if run.name == DENSE), runs[0])
    steps = len(dense.steps)
    made = table(
        part.title,
        ["method"],
        [
            f"{metric.name}\nat the end",
            f"{metric.name}\nafter {steps} steps",
            "steps",
            "bytes/\nstep",
            "time/\nstep",
        ],
    )
    for run in runs:
        row, values = summarise(run), (run.metrics[-1]["value"] if run.metrics else None, at_step(run, steps))
        per_step = row.seconds / max(row.steps, 1)  # on average: with `every`, steps differ
        texts = ["" if value is None else metric.show(value) for value in values]
        made.add_row(run.name, *texts, f"{row.steps:,}", size(row.bytes_per_step), duration(per_step))
    console().print(made)
