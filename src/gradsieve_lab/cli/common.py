"""Code shared by all commands: errors in one sentence, tables for 80 columns, JSON."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gradsieve._check import BadInput
from gradsieve_lab.conditions import conditions, in_words

AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON.")]


@contextmanager
def clear_errors() -> Iterator[None]:
    """End with one sentence and exit code 2 on a user's mistake; tracebacks are for our own bugs."""
    try:
        yield
    except BadInput as error:
        refuse(str(error))


def refuse(sentence: str) -> NoReturn:
    typer.echo(f"gradsieve: {sentence}", err=True)
    raise typer.Exit(2)


def check_out(out: Path | None) -> None:
    """Raise an error if no file can be written there, as far as is known beforehand."""
    if out is not None and out.is_dir():
        raise BadInput(f"out must be a file, got the folder {out}")


def new_folder(name: str) -> Path:
    """The default folder of a run: below runs/, with the time."""
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def check_folder(folder: Path) -> Path:
    if folder.exists():
        raise BadInput(f"out must be a new folder, got {folder}, which exists")
    return folder


def console() -> Console:
    return Console(width=80, highlight=False)


def table(title: str, words: list[str], figures: list[str]) -> Table:
    """A table for 80 columns: text columns aligned left, number columns right."""
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in words:
        made.add_column(heading, overflow="fold")
    for heading in figures:
        made.add_column(heading, justify="right", no_wrap=True)
    return made


def foot() -> str:
    return in_words(conditions())


def print_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")
