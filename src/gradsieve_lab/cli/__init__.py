"""Train data-parallel models and send only the part of the gradient that matters.

Example: gradsieve compare mlp --sparsifiers dense,topk,exdyna
"""

import json
from typing import Any

import typer

from gradsieve_lab.cli import bench, lab, plan, runs
from gradsieve_lab.cli.common import AsJson, console, print_json
from gradsieve_lab.conditions import conditions

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help=__doc__,
)
app.command()(runs.demo)
app.command()(runs.train)
app.command()(runs.compare)
app.command()(runs.simulate)
app.command()(runs.report)
app.command(context_settings={"allow_extra_args": True})(plan.plan)
app.add_typer(bench.app, name="bench")
app.add_typer(lab.app, name="lab")


def main() -> None:
    """The console script."""
    app()


@app.command()
def info(as_json: AsJson = False) -> None:
    """Versions, machine, tasks and sparsifiers.

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
    groups = {"sparsifiers": known, "torch's own hooks": PEERS, "a replica for each worker": REPLICATED}
    for title, entries in groups.items():
        out.print(title)
        for name, options in entries.items():
            out.print(f"  {name:<16}" + ", ".join(f"{key}={json.dumps(value)}" for key, value in options.items()))
    out.print("tasks: data sets; models")
    for name, made in TASKS.items():
        out.print(f"  {name:<16}{', '.join(made.DATASETS)}; {', '.join(made.MODELS)}")


__all__ = ["app", "main"]
