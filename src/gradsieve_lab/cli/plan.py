"""`gradsieve plan`: predict the step time on a network, and whether anything beats plain DDP there."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
import typer

from gradsieve import plan as make_plan
from gradsieve._check import BadInput, at_least
from gradsieve.plan.links import LATENCY_MS
from gradsieve.plan.subjects import made_by, watch
from gradsieve.plan.ways_of import DENSITIES, EVERY, GRADIENTS, RANKS
from gradsieve_lab._files import write_whole
from gradsieve_lab.cli.common import AsJson, check_out, clear_errors, print_json

T = TypeVar("T")
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def plan(
    context: typer.Context,
    what: Annotated[
        str, typer.Argument(metavar="[WHAT]", help="MODULE:factory, or a training script (arguments after --).")
    ] = "",
    parameters: Annotated[str, typer.Option(help="Number of parameters, as in 125M.")] = "",
    model_bytes: Annotated[str, typer.Option(help="Size of the model in float32, as in 500M.")] = "",
    workers: Annotated[int | None, typer.Option(help="Number of workers; default: those of torchrun.")] = None,
    link: Annotated[str, typer.Option(help="Bandwidth, as in 100mbit; default: measured between ranks.")] = "",
    latency_ms: Annotated[float, typer.Option(help="Network latency, if --link is given.")] = LATENCY_MS,
    step_ms: Annotated[float | None, typer.Option(help="Step time of one worker alone; default: measured.")] = None,
    sparsifier: Annotated[str, typer.Option(help=f"For gradients: {' or '.join(GRADIENTS)}.")] = GRADIENTS[0],
    densities: Annotated[str, typer.Option(help="Densities to compare.")] = ",".join(map(str, DENSITIES)),
    every: Annotated[str, typer.Option(help="Steps between rounds of share.")] = ",".join(map(str, EVERY)),
    ranks: Annotated[str, typer.Option(help="Ranks of PowerSGD.")] = ",".join(map(str, RANKS)),
    values: Annotated[str, typer.Option(help="Format of sent values: fp32, bf16 or fp8.")] = "fp32",
    backend: Annotated[str | None, typer.Option(help="gloo or nccl; default: the ranks' backend, or gloo.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page with a plot.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the step time and recommend a way to train.

    Give numbers, or start it with torchrun on the hosts where you will train: it then measures the network.
    A factory returns a model, or a model and a function for the loss of a batch.

    Example: gradsieve plan --parameters 125M --workers 8 --link 100mbit --step-ms 120
    """
    with clear_errors():
        check_out(html)
        subject, measured, loss = _subject(what, context.args, parameters, model_bytes)
        options: dict[str, Any] = {
            "densities": _several("densities", densities, float),
            "every": _several("every", every, int),
            "ranks": _several("ranks", ranks, int),
            "sparsifier": sparsifier,
            "values": values,
            "backend": backend,
            "latency_ms": latency_ms,
            "loss": loss,
        }
        step = measured if step_ms is None else step_ms
        with _process_group() as leads:
            found = make_plan(subject, workers, link or None, step, **options)
    if not leads:
        return
    if html is not None:
        with clear_errors():
            write_whole(html, found.page())
    if as_json:
        print_json(found.to_dict())
        return
    typer.echo(str(found))
    if found.best.call:
        typer.echo(f"\n  {found.best.call}")
    if html is not None:
        typer.echo(f"page: {html}")


def _subject(what: str, arguments: list[str], parameters: str, model_bytes: str) -> tuple[Any, float | None, Any]:
    """A model or its size, milliseconds per step if they were measured, and a loss to measure them with."""
    named = {"WHAT": what, "--parameters": parameters, "--model-bytes": model_bytes}
    given = [name for name, value in named.items() if value]
    if len(given) != 1:
        raise BadInput(f"one of {', '.join(named)} must be given, got {', '.join(given) or 'none'}")
    if parameters:
        return _count("parameters", parameters), None, None
    if model_bytes:
        return at_least("model_bytes", _count("model_bytes", model_bytes), 4) // 4, None, None
    if what.endswith(".py"):
        shapes, seconds = watch(Path(what), arguments)
        return torch.nn.ParameterList(torch.empty(shape, device="meta") for shape in shapes), seconds * 1e3, None
    if ":" not in what:
        raise BadInput(f"WHAT must be MODULE:factory or a script that ends in .py, got {what!r}")
    model, loss = made_by(what)
    return model, None, loss


@contextmanager
def _process_group() -> Iterator[bool]:
    """Join a process group if torchrun or similar started several processes; yields whether this one leads."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    gpu = torch.cuda.is_available() and dist.is_nccl_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    try:
        yield dist.get_rank() == 0
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _count(name: str, text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)b?", text.strip().lower())
    if found is None:
        raise BadInput(f"{name} must be a number such as 125M, got {text!r}")
    return round(float(found[1]) * _SIZES[found[2]])


def _several(name: str, text: str, kind: Callable[[str], T]) -> list[T]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise BadInput(f"{name} must be numbers separated by commas, got {text!r}") from None
