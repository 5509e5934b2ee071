"""The model to plan for: from `MODULE:factory`, or from a training script whose steps are observed."""

import contextlib
import importlib
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradsieve._check import BadInput

STEPS, WARM_UP, FEWEST = 8, 3, 2  # optimizer steps of a script: timed, warm-up, and fewest timed
Loss = Callable[[], Tensor]


def made_by(name: str) -> tuple[nn.Module, Loss | None]:
    """Call `MODULE:factory`, which returns a model, or a model and a function that computes the loss of a batch."""
    module, _, factory = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = getattr(importlib.import_module(module), factory)()
    except ImportError as problem:
        raise BadInput(f"{name} could not be imported: {problem}") from problem
    except AttributeError as problem:
        raise BadInput(f"{name} must name a function of a module, got {problem}") from problem
    finally:
        sys.path.remove(os.getcwd())
    model, loss = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(model, nn.Module) or not (loss is None or callable(loss)):
        raise BadInput(f"{name} must return a model, or a model and a function for its loss, got {found!r}")
    return model, loss


class Watched:
    """Observer of a script's optimizer steps: when they ended, and which parameters they trained."""

    def __init__(self) -> None:
        self._ends: dict[int, list[float]] = {}
        self.parameters: dict[int, Tensor] = {}

    def __call__(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        for group in optimizer.param_groups:
            self.parameters |= {id(each): each for each in group["params"] if each.requires_grad}
        ends = self._ends.setdefault(id(optimizer), [])
        ends.append(time.perf_counter())
        if len(ends) > WARM_UP + STEPS:
            raise _EnoughSteps

    @property
    def seconds(self) -> float:
        """Seconds per step of the optimizer that took the most steps."""
        ends = max(self._ends.values(), key=len, default=[])
        taken = [after - before for before, after in pairwise(ends)]
        if len(taken) < FEWEST:
            raise BadInput(f"the script must make at least {FEWEST + 1} optimizer steps, got {len(ends)}")
        return median(taken[min(WARM_UP, len(taken) - FEWEST) :])


def watch(script: Path, arguments: Sequence[str]) -> tuple[list[tuple[int, ...]], float]:
    """Run a training script until it has taken some optimizer steps; returns its parameters' shapes, and seconds
    per step. It runs in a world of one rank, so it waits for nobody. Its output goes to stderr."""
    if not script.is_file():
        raise BadInput(f"{script} must be a training script, got no such file")
    watched = Watched()
    hook = register_optimizer_step_post_hook(watched)
    try:
        with _one_rank(), _as_program(script, arguments), contextlib.suppress(_EnoughSteps, SystemExit):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        hook.remove()
        if dist.is_initialized():
            dist.destroy_process_group()
    seconds = watched.seconds
    return [tuple(parameter.shape) for parameter in watched.parameters.values()], seconds


class _EnoughSteps(BaseException):
    """Raised to end a script; not an `Exception`, so that training loops do not catch it."""


@contextlib.contextmanager
def _as_program(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv = before
        sys.path.remove(str(script.resolve().parent))


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """Set the environment of torchrun with one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    before = dict(os.environ)
    elastic = [name for name in before if name.startswith("TORCHELASTIC")]
    for name in elastic:
        del os.environ[name]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **where}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
