"""The commands that train (train, compare, simulate), and report, which shows what they recorded."""

import dataclasses
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from gradsieve._check import BadInput
from gradsieve_lab.cli.common import AsJson, check_out, clear_errors, console, new_folder, print_json, table
from gradsieve_lab.cli.live import watched
from gradsieve_lab.cli.options import run_options, virtual_options
from gradsieve_lab.netlab.rootless import enter_lab
from gradsieve_lab.report import write_csv, write_report
from gradsieve_lab.report.table import duration, size, whole_percent
from gradsieve_lab.runs import comparing, running
from gradsieve_lab.runs.loggers import need_logger
from gradsieve_lab.runs.methods import Method, parse_method, parse_methods
from gradsieve_lab.runs.records import Run, read_run
from gradsieve_lab.runs.running import command_line
from gradsieve_lab.runs.settings import Settings
from gradsieve_lab.runs.summary import summarise, summarise_all
from gradsieve_lab.tasks import TASKS

TaskName = Annotated[str, typer.Argument(metavar="TASK", show_default=False, help=f"One of {', '.join(TASKS)}.")]
Sparsifier = Annotated[str, typer.Option(help="A method; options as in cltk:beta=0.1. See: gradsieve info")]
NewFolder = Annotated[Path | None, typer.Option(help="A new folder; default: one below runs/.")]
_MAY_CHANGE = ("steps", "seconds", "workers", "data_dir", "lab_hosts", "lab_rate", "timeout")  # by --resume
SIMULATED = (  # what `simulate --json` prints, in this order
    "task",
    "sparsifier",
    "workers",
    "steps",
    "density_target",
    "density_mean",
    "density_max",
    "density_last",
    "density_within_5pct",
    "selected_total",
    "bytes_per_step",
    "bytes_total",
    "collectives_per_step",
    "total_error",
    "residual_norm_last",
    "imbalance_mean",
    "buildup_mean",
    "metric_name",
    "metric_best",
    "metric_last",
    "loss_last",
    "seconds",
)


@run_options
def train(
    context: typer.Context,
    options: dict[str, Any],
    task: TaskName = "",
    sparsifier: Sparsifier = "exdyna",
    out: NewFolder = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this folder.")] = None,
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps between checkpoints; default: only at the end or Ctrl-C.", show_default=False)
    ] = 0,
    virtual: Annotated[bool, typer.Option("--virtual", help="Virtual workers in one process.")] = False,
    log: Annotated[str, typer.Option(help="Also log to tensorboard, wandb or mlflow.", show_default=False)] = "",
    as_json: AsJson = False,
) -> None:
    """Train a task with one method, in real processes.

    Under torchrun it uses torchrun's processes. Ctrl-C saves a checkpoint; go on with --resume.

    Example: gradsieve train resnet --sparsifier topk --density 0.01
    """
    with clear_errors():
        if resume is not None:
            settings, folder = _resumed(resume, context), resume
        else:
            given = {"checkpoint_every": checkpoint_every, "virtual": virtual, "log": log}
            settings = _settings(task, options | given).with_method(parse_method(sparsifier, options["density"]))
            folder = out or new_folder(f"{task}-{settings.sparsifier}")
        need_logger(settings.log)
    stop = running.Stop()
    with _watched(settings, as_json, stop) as listen:
        run = running.run(settings, folder, listen, stop, resume=resume is not None)
    if run is None:  # another of torchrun's processes reports it
        return
    _print_results([run], as_json)
    if stop.signal:
        again = f"gradsieve train --resume {folder}"
        typer.echo(f"stopped after {len(run.steps)} steps; go on with: {again}", err=True)
        raise typer.Exit(128 + stop.signal)
    if not as_json:
        typer.echo(f"record and checkpoint: {folder}\nreport: gradsieve report {folder} --out report.html")


@run_options
def compare(
    options: dict[str, Any],
    task: TaskName,
    sparsifiers: Annotated[
        str, typer.Option(help="Methods, separated by commas; dense and alone show the gain kept.")
    ] = "dense,alone,share,exdyna,topk,cltk,hard_threshold,sidco,average",
    virtual: Annotated[bool, typer.Option("--virtual", help="Virtual workers in one process.")] = False,
    out: NewFolder = None,
    as_json: AsJson = False,
) -> None:
    """Compare methods on a task: a table and a report.

    Task, seed and data are the same for all methods.

    Example: gradsieve compare mlp --sparsifiers dense,powersgd,exdyna
    """
    with clear_errors():
        settings = _settings(task, options | {"virtual": virtual, "save": False})
        methods = parse_methods(sparsifiers, options["density"])
        if running.under_torchrun():
            raise BadInput("compare must start its own processes, got torchrun: use gradsieve train there")
    _compare(settings, methods, out or new_folder(f"compare-{task}"), as_json)


@virtual_options
def simulate(
    options: dict[str, Any],
    task: TaskName = "mlp",
    sparsifier: Sparsifier = "exdyna",
    out: Annotated[Path | None, typer.Option(help="Keep the record in this new folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Try one sparsifier on virtual workers, without processes.

    Example: gradsieve simulate logreg --sparsifier topk --workers 20
    """
    with clear_errors():
        settings = _settings(task, options | {"virtual": True, "save": False})
        settings = settings.with_method(parse_method(sparsifier, options["density"]))
    stop = running.Stop()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gradsieve-") as scratch:
        folder = out or Path(scratch) / "run"
        with _watched(settings, as_json, stop) as listen:
            run = running.run(settings, folder, listen, stop)
    assert run is not None
    known = {**dataclasses.asdict(summarise(run)), "sparsifier": run.name}
    found = {key: known[key] for key in SIMULATED} | {"seconds": time.perf_counter() - started}
    if as_json:
        print_json(found)
    else:
        for key, value in found.items():
            console().print(f"{key:<22}{_readable(key, value)}")
    if stop.signal:
        again = command_line().replace("simulate", "train --virtual", 1)
        typer.echo(f"stopped after {len(run.steps)} steps; with checkpoints: {again}", err=True)
        raise typer.Exit(128 + stop.signal)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs, or of comparisons.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    csv: Annotated[Path | None, typer.Option(help="Also write CSV tables into this folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make one page from recorded runs.

    The report is one HTML file that opens offline.

    Example: gradsieve report runs/demo --out report.html
    """
    with clear_errors():
        check_out(out)
        found = [run for path in runs for run in _runs_in(path)]
        write_report(found, out)
        if csv is not None:
            write_csv(found, csv)
    if as_json:
        print_json({"report": str(out), "runs": [dataclasses.asdict(row) for row in summarise_all(found)]})
    else:
        typer.echo(f"report of {len(found)} run{'s' * (len(found) > 1)}: {out}")


def _compare(settings: Settings, methods: list[Method], folder: Path, as_json: bool) -> None:
    with clear_errors():
        running.check_new(folder)
        comparing.check(settings, methods)
    stop = running.Stop()
    with _watched(settings, as_json, stop) as listen:
        runs = comparing.compare(settings, methods, folder, listen, stop)
    page = folder / "report.html"
    with clear_errors():
        write_report(runs, page)
        write_csv(runs, folder)
    _print_results(runs, as_json)
    if not as_json:
        typer.echo(f"report: {page}")
    if stop.signal:
        ended = sum(run.end is not None and run.end["reason"] == "finished" for run in runs)
        again = f"{ended} of {len(methods)} runs finished; the others are marked in the report. Start again with: "
        typer.echo(f"stopped: {again}{command_line()}", err=True)
        raise typer.Exit(128 + stop.signal)


def _settings(task: str, options: dict[str, Any]) -> Settings:
    """The settings, checked together with the task and its files before anything starts or is written."""
    if not task:
        raise BadInput(f"task must be one of {', '.join(TASKS)}, got none")
    if options.get("workers") is None:
        options["workers"] = options.get("lab_hosts") or 4
    settings = Settings(task, **options)
    if running.under_torchrun():
        settings = dataclasses.replace(settings, workers=running.torchrun_workers())
    return _checked(settings)


def _checked(settings: Settings) -> Settings:
    """The same settings, after checking that their files exist and their lab can run."""
    settings.make_task()
    if settings.lab_hosts:
        enter_lab()
    return settings


def _resumed(folder: Path, context: typer.Context) -> Settings:
    """The recorded settings, with the changes given: a longer run, or more or fewer workers."""
    settings = Settings.from_dict(read_run(folder).settings)
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    for name in given:
        if name not in ("resume", "as_json", *_MAY_CHANGE):
            flag = "--" + name.replace("_", "-")
            raise BadInput(
                f"--resume goes with --steps, --workers, --data-dir, --timeout, --lab only, got {flag} too"
            )
    changed = {name: context.params[name] for name in _MAY_CHANGE if name in given}
    if running.under_torchrun():
        changed["workers"] = running.torchrun_workers()
    return _checked(dataclasses.replace(settings, **changed))


def _watched(settings: Settings, as_json: bool, stop: running.Stop) -> AbstractContextManager[running.Listen]:
    return watched(TASKS[settings.task].METRIC, stop, hidden=as_json or not running.leads())


def _runs_in(path: Path) -> list[Run]:
    """The run in a folder or file, or all runs in the folders below."""
    below = sorted({record.parent for record in path.glob("*/records.jsonl*")}) if path.is_dir() else []
    if below and not list(path.glob("records.jsonl*")):
        return [read_run(folder) for folder in below]
    return [read_run(path)]


def _print_results(runs: list[Run], as_json: bool) -> None:
    rows = summarise_all(runs)
    if as_json:
        print_json([dataclasses.asdict(row) for row in rows])
        return
    if not runs:
        return
    first, metric = rows[0], runs[0].metric
    kind = "virtual workers" if first.virtual else "processes"
    in_lab = any(row.wire_bytes_per_step is not None for row in rows)
    gains = any(row.gain_kept is not None for row in rows)
    columns = {escape(metric.name): [_shown(metric.show, row.metric_last) for row in rows]}
    if gains:
        columns["gain\nkept"] = [_shown(whole_percent, row.gain_kept) for row in rows]
    if not in_lab:
        columns["density"] = [f"{row.density_mean:.3g}" for row in rows]
    columns["bytes/\nstep"] = [size(row.bytes_per_step) for row in rows]
    if in_lab:
        columns["counted"] = [_shown(size, row.wire_bytes_per_step) for row in rows]
    columns["saved"] = [_shown(lambda times: f"{times:.3g}x", row.compression) for row in rows]
    times = {"select": "select_ms", "comm.": "communicate_ms", "step": "step_ms"}
    for heading, field in list(times.items())[gains:]:  # not all fit
        columns[heading] = [f"{getattr(row, field):.1f}" for row in rows]
    columns["time"] = [duration(row.seconds) for row in rows]
    made = table(
        f"{first.task} on {first.dataset}: {first.workers} {kind}, {first.steps} steps, "
        f"{first.parameters:,} parameters",
        ["method"],
        list(columns),
    )
    for place, row in enumerate(rows):
        made.add_row(escape(row.method), *(texts[place] for texts in columns.values()))
    console().print(made)
    console().print(_legend(escape(metric.name), in_lab, gains))


def _legend(metric: str, in_lab: bool, gains: bool) -> str:
    return " ".join(
        [
            f"{metric}: after the last step.",
            *(["gain kept: fraction of dense's gain over alone."] if gains else []),
            "bytes: sent per worker.",
            *(["counted: sent per step by a host's interface, headers included."] if in_lab else []),
            "saved: bytes of plain data-parallel training over these.",
            f"{'' if gains else 'select, '}comm., step: median ms per step and worker,",
            "mean if only some steps exchange.",
        ]
    )


def _readable(key: str, value: Any) -> str:
    """Format a value of `simulate` with its unit."""
    if key.startswith("bytes_"):
        return size(value)
    if key == "seconds":
        return duration(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _shown(show: Callable[[float], str], value: float | None) -> str:
    return "" if value is None else show(value)
