"""The options of a run, defined once for all commands that start runs."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_type_hints

import typer


def _option(kind: Any, help: str, default: Any) -> inspect.Parameter:
    """A parameter as typer reads it; its name is filled in below."""
    option = typer.Option(default, help=help, show_default=default not in ("", 0, None))
    return inspect.Parameter("_", inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


_FROM_RECIPE = "default: the task's recipe."
_OPTIONS = {
    "density": _option(float, "Fraction of the gradient to send per step, in (0, 1].", 0.01),
    "workers": _option(int | None, "Number of workers; default: 4, or one per lab host.", None),
    "lab_hosts": _option(int, "Run on this many hosts, with slow links between them (Linux).", 0),
    "lab_rate": _option(str, "Link rate: 100mbit, or up/down, or one per host; default: 1gbit.", ""),
    "steps": _option(int, f"Training steps; {_FROM_RECIPE}", 0),
    "seconds": _option(float, "End after this much training time; default: after all steps.", 0.0),
    "batch": _option(int, f"Examples per worker and step; {_FROM_RECIPE}", 0),
    "dataset": _option(str, "A data set of the task; default: the embedded one.", ""),
    "data_dir": _option(str, "Folder of real data sets; default: $GRADSIEVE_DATA.", ""),
    "model": _option(str, "A model of the task, such as resnet18; default: its first.", ""),
    "width": _option(float, "Multiplies the model's channels or hidden units.", 1.0),
    "limit": _option(int, "Number of training examples to use; default: all.", 0),
    "skew": _option(float, "Fraction of a shard sorted by label, in [0, 1].", 0.0),
    "optimizer": _option(str, f"sgd or adam; {_FROM_RECIPE}", ""),
    "lr": _option(float, "Learning rate; default: the recipe's, scaled with the batch.", 0.0),
    "momentum": _option(float | None, f"Momentum of sgd; {_FROM_RECIPE}", None),
    "weight_decay": _option(float | None, f"Weight decay; {_FROM_RECIPE}", None),
    "clip": _option(float | None, f"Largest gradient norm, 0 for no limit; {_FROM_RECIPE}", None),
    "warm_up": _option(float | None, f"Fraction of steps for warm-up; {_FROM_RECIPE}", None),
    "decay": _option(str, f"cosine or constant learning rate; {_FROM_RECIPE}", ""),
    "dense_steps": _option(int, "Initial steps that send the full gradient.", 0),
    "seed": _option(int, "Same seed, same run.", 0),
    "timeout": _option(float, "Seconds to wait for a worker before the run fails.", 300.0),
    "eval_every": _option(int, "Steps between evaluations; default: 1/20 of the run.", 0),
}


def run_options(
    command: Callable[..., None],
    *,
    without: Sequence[str] = (),
    instead: Mapping[str, inspect.Parameter] = MappingProxyType({}),
) -> Callable[..., None]:
    """Give a command all options of a run; it receives them as one dict, its argument `options`.

    Args:
        without: options that make no sense for this command.
        instead: options for which the command has its own help text.
    """
    own = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    parameters = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in own.parameters.items()
        if name != "options"
    ]
    known = {**_OPTIONS, **instead}
    left_out = (*own.parameters, *without)
    shared = [parameter.replace(name=name) for name, parameter in known.items() if name not in left_out]

    @functools.wraps(command)
    def wrapper(**given: Any) -> None:
        options = {parameter.name: given.pop(parameter.name) for parameter in shared}
        command(options=options, **given)

    wrapper.__signature__ = own.replace(parameters=[*parameters, *shared])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in [*parameters, *shared]}
    return wrapper


# Virtual workers run on no host and are never waited for.
virtual_options = functools.partial(
    run_options,
    without=("lab_hosts", "lab_rate", "timeout"),
    instead={"workers": _option(int | None, "Number of workers; default: 4.", None)},
)
