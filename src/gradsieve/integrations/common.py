"""Code shared by the integrations: unwrapping models, and every rank's state in a checkpoint."""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsieve._check import BadInput, BadType
from gradsieve.comm.collectives import Program, all_gather
from gradsieve.ddp import Sieve, sparsify
from gradsieve.share import ShareSieve, share
from gradsieve.state.checkpoint import CheckpointError


def need(framework: str) -> None:
    """Raise an error that names the extra to install if a framework is missing."""
    try:
        importlib.import_module(framework)
    except ModuleNotFoundError as problem:
        if problem.name != framework:
            raise
        words = f"{framework} is not installed: pip install 'gradsieve[integrations]'"
        raise ModuleNotFoundError(words, name=framework) from None


class Gradients:
    """`sparsify` applied to a framework's model."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        *arguments: Any,
        scaler: Any,
        way_out: str,
        **options: Any,
    ) -> None:
        """way_out: the advice in the error if the model is not a DDP model, in the framework's terms."""
        ddp = find_ddp(model)
        if ddp is None:
            raise BadType(f"model must be a DistributedDataParallel, got {type(model).__name__}: {way_out}")
        self._ddp: DistributedDataParallel | None = ddp
        self.module: nn.Module = ddp.module
        self.sieve: Sieve | ShareSieve = sparsify(ddp, *arguments, scaler=scaler, **options)

    def serves(self, model: nn.Module) -> bool:
        """Whether the sieve is attached to this model."""
        return find_ddp(model) is self._ddp

    def save(self, folder: Path, *, shared: bool = True) -> None:
        """Write every rank's state; all ranks must call it. shared: all ranks see the folder."""
        self.sieve.save(folder, shared=shared)

    def check(self, folder: Path) -> None:
        """Raise an error on all ranks if the folder is missing on any of them."""
        self.sieve.world.run([_present(folder)])

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; all ranks must call it."""
        self.check(folder)
        self.sieve.load(folder)

    def agreed(self) -> AbstractContextManager[None]:
        """A context in which the model holds the agreed weights."""
        return nullcontext()

    def agreed_copy(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of the model's state dict with the agreed weights."""
        return dict(state_dict)

    def finish(self) -> None:
        """Make all replicas equal."""

    def close(self) -> None:
        """Detach from the model."""


class Weights(Gradients):
    """`share` applied to a framework's model and optimizers. A DDP model stops averaging gradients.

    Replicas differ, so a checkpoint holds every rank's optimizer state, buffers and loss scale.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        *arguments: Any,
        scaler: Any,
        way_out: str,
        **options: Any,
    ) -> None:
        if not torch.distributed.is_initialized():
            raise BadInput(f"share needs a process group, got none: {way_out}")
        self.module, self._optimizers, self._scaler = bare(model), plain(optimizers), scaler
        self._ddp = find_ddp(model)
        if self._ddp is not None:
            _stop_averaging(self._ddp)
        self.sieve: ShareSieve = share(self.module, self._optimizers, *arguments, scaler=scaler, **options)

    def serves(self, model: nn.Module) -> bool:
        return False

    def save(self, folder: Path, *, shared: bool = True) -> None:
        self.sieve.save(folder, self._own(), shared=shared)

    def load(self, folder: Path) -> None:
        self.check(folder)
        extra = self.sieve.load(folder)
        for optimizer, state in zip(self._optimizers, extra["optimizers"].values(), strict=True):
            numbered = {int(number): part for number, part in state.items()}
            optimizer.load_state_dict({**optimizer.state_dict(), "state": numbered})
        for name, buffer in self.module.named_buffers():
            buffer.detach().copy_(extra["buffers"][name])
        if self._scaler is not None:
            self._scaler.load_state_dict(extra["scaler"])

    def agreed(self) -> AbstractContextManager[None]:
        return self.sieve.shared()

    def agreed_copy(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        with self.agreed():
            return {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in state_dict.items()
            }

    def finish(self) -> None:
        self.sieve.finish()

    def close(self) -> None:
        self.sieve.close()
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = True

    def _own(self) -> dict[str, Any]:
        return {
            "optimizers": {str(place): each.state_dict()["state"] for place, each in enumerate(self._optimizers)},
            "buffers": dict(self.module.named_buffers()),
            "scaler": {} if self._scaler is None else self._scaler.state_dict(),
        }


MODES = {"gradients": Gradients, "weights": Weights}


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP module inside the wrappers of torch.compile and Fabric; None if there is none."""
    inner: Any = model
    while inner is not None and not isinstance(inner, DistributedDataParallel):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "_forward_module", None)
    return inner


def bare(model: nn.Module) -> nn.Module:
    """The module itself, without any wrapper."""
    ddp = find_ddp(model)
    inner: nn.Module = model if ddp is None else ddp.module
    return getattr(inner, "_orig_mod", inner)


def plain(optimizers: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """The torch optimizers inside a framework's wrappers; they step only when gradients are complete."""
    given = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    found = []
    for each in given:
        while isinstance(inner := getattr(each, "optimizer", None), Optimizer):
            each = inner
        found.append(each)
    return found


def _present(folder: Path) -> Program[None]:
    """Raise an error on all ranks if the checkpoint was written without Gradsieve."""
    replies = yield from all_gather("checkpoint", torch.tensor([folder.is_dir()], dtype=torch.uint8))
    for rank, reply in enumerate(replies):
        if not reply.item():
            raise CheckpointError(
                f"the checkpoint has no state of gradsieve, {folder} does not exist on rank {rank}: resume from "
                "one that was saved with it, or load only the model's weights from this one"
            )


def _stop_averaging(ddp: DistributedDataParallel) -> None:
    """Keep DDP in its `no_sync()` state."""
    if ddp.static_graph:
        raise BadInput(
            "model must not use DDP's static_graph with share, which stops DDP's averaging: leave it out"
        )
    ddp.require_backward_grad_sync = False
    ddp.require_forward_param_sync = False  # rank 0's buffers would replace those of the other ranks
