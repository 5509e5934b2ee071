"""Train data-parallel models over slow networks: send only the part that matters.

Example: gradsieve compare mlp --sparsifiers dense,topk,exdyna
"""

import json
from typing import Annotated, Any

import typer

from gradsieve._version import __version__
from gradsieve_lab.cli import bench, lab, plan, runs
from gradsieve_lab.cli.common import AsJson, console, print_json
from gradsieve_lab.cli.demo import demo
from gradsieve_lab.conditions import commit, conditions
from gradsieve_lab.netlab.rootless import may_restart

FIRST_STEPS = """Train data-parallel models over slow networks: send about 1 % per step.

  gradsieve demo                          see it on this machine, in 4 minutes
  gradsieve compare mlp --steps 100       compare methods on a small task
  gradsieve lab run -- python train.py    your own DDP script over slow links

All commands: gradsieve --help.
In your own script, start with gradsieve.sparsify or gradsieve.share."""
app = typer.Typer(
    invoke_without_command=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help=__doc__,
)
app.command()(demo)
app.command()(runs.train)
app.command()(runs.compare)
app.command()(runs.simulate)
app.command()(runs.report)
app.command(context_settings={"allow_extra_args": True})(plan.plan)
app.add_typer(bench.app, name="bench")
app.add_typer(lab.app, name="lab")


def _show_version(wanted: bool) -> None:
    if wanted:
        where = "" if commit() == "unknown" else f" (commit {commit()})"
        typer.echo(f"gradsieve {__version__}{where}")
        raise typer.Exit


@app.callback()
def first_steps(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(FIRST_STEPS)


first_steps.__doc__ = __doc__


def main() -> None:
    """Entry point of the console script."""
    may_restart()
    app()


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def doctor(context: typer.Context) -> None:
    """Check devices, kernels and links: results, speed, latency.

    Example: torchrun --nproc-per-node 2 -m gradsieve doctor
    """
    from gradsieve import doctor

    raise typer.Exit(doctor.main(context.args))


@app.command()
def info(as_json: AsJson = False) -> None:
    """Show versions, machine, tasks and methods.

    Example: gradsieve info --json
    """
    from gradsieve.sparsifiers import SPARSIFIERS, make_sparsifier
    from gradsieve_lab.runs.methods import PEERS, REPLICATED
    from gradsieve_lab.tasks import TASKS

    known: dict[str, dict[str, Any]] = {name: make_sparsifier(name).options() for name in SPARSIFIERS}
    tasks = {name: {"datasets": made.DATASETS, "models": made.MODELS} for name, made in TASKS.items()}
    if as_json:
        methods = {"sparsifiers": known, "hooks": PEERS, "replicas": REPLICATED}
        print_json({"conditions": conditions(), **methods, "tasks": tasks})
        return
    out = console()
    for name, value in conditions().items():
        out.print(f"{name:<12}{value}")
    groups = {"sparsifiers": known, "torch's own hooks": PEERS, "one replica per worker": REPLICATED}
    for title, entries in groups.items():
        out.print(title)
        for name, options in entries.items():
            out.print(f"  {name:<16}" + ", ".join(f"{key}={json.dumps(value)}" for key, value in options.items()))
    out.print("tasks: data sets; models")
    for name, made in TASKS.items():
        out.print(f"  {name:<16}{', '.join(made.DATASETS)}; {', '.join(made.MODELS)}")


__all__ = ["app", "main"]
