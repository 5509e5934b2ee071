"""The layout of gradients: one vector of all parameters (the arena), and DDP's buckets, which DDP may rebuild."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradsieve import ops
from gradsieve._check import BadInput, BadType
from gradsieve.comm.step import Sent
from gradsieve.share.weights import labels_of


@dataclass(frozen=True)
class Place:
    """A part of the gradient: its elements in the arena, and its bucket."""

    start: int
    stop: int
    bucket: int
    offset: int

    def within(self, buffer: Tensor) -> Tensor:
        """This part of its bucket."""
        return buffer[self.offset : self.offset + self.stop - self.start]


class Layout:
    """The parameters in the arena, and tables from there to the buckets of a step."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, apart: bool) -> None:
        """apart: parameters are not joined with their neighbours, as some of them may be unused."""
        self.apart = apart
        self._starts: dict[int, int] = {}
        self.n = 0
        for parameter in parameters:
            self._starts[id(parameter)] = self.n
            self.n += parameter.numel()
        self._known: tuple[list[Place], tuple[Tensor, Tensor, Tensor]] | None = None

    def places(self, parameters: Iterable[nn.Parameter], bucket: int) -> list[Place]:
        """The parts of a bucket; those adjacent in both become one part."""
        found: list[Place] = []
        offset = 0
        for parameter in parameters:
            start, size = self._starts[id(parameter)], parameter.numel()
            if found and found[-1].stop == start and not self.apart:
                found[-1] = replace(found[-1], stop=start + size)
            else:
                found.append(Place(start, start + size, bucket, offset))
            offset += size
        return found

    def write_(self, sent: Sent, places: list[Place], buffers: Sequence[Tensor]) -> None:
        """Write the update into the buckets."""
        dense = {number: buffer for number, buffer in enumerate(buffers) if not buffer.is_sparse}
        if not sent.finite:
            for buffer in dense.values():
                buffer.fill_(torch.nan)
        elif sent.indices is None:
            for place in places:
                place.within(dense[place.bucket]).copy_(sent.values[place.start : place.stop])
        else:
            starts, shifts, owners = self._tables(places, sent.indices.device)
            which = torch.searchsorted(starts, sent.indices, right=True) - 1
            targets, owners = sent.indices + shifts[which], owners[which]
            for number, buffer in dense.items():
                ops.scatter_update_(buffer, targets.where(owners == number, -1), sent.values)

    def _tables(self, places: list[Place], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Start, shift and bucket of each part, in the arena's order; known until DDP rebuilds buckets."""
        if self._known is None or self._known[0] != places:
            order = sorted((place for place in places if place.start < place.stop), key=lambda place: place.start)
            starts = torch.tensor([place.start for place in order], device=device)
            shifts = torch.tensor([place.offset - place.start for place in order], device=device)
            owners = torch.tensor([place.bucket for place in order], device=device)
            self._known = list(places), (starts, shifts, owners)
        return self._known[1]


def checked(model: nn.Module) -> DistributedDataParallel:
    """The model, also if it was compiled, if its gradients can be sparsified."""
    model = getattr(model, "_orig_mod", model)
    contract = sys.modules.get("torch.distributed._composable.contract")  # whoever applied one has imported it
    if contract is not None and "replicate" in (contract._get_registry(model) or {}):
        raise BadInput("ddp_model must be wrapped with DistributedDataParallel, got composable replicate")
    if not isinstance(model, DistributedDataParallel):
        raise BadType(f"ddp_model must be a DistributedDataParallel, got {type(model).__name__}")
    if model.mixed_precision is not None:
        raise BadInput(
            "ddp_model must not use DDP's mixed_precision, which has a communication hook of its own: use autocast"
        )
    if model._comm_hooks:
        raise BadInput("ddp_model must not have a communication hook yet, got one that has: sparsify it only once")
    return model


def retire(model: DistributedDataParallel) -> None:
    """End a wrapper: its hooks on the parameters would run beside those of the wrapper that replaces it."""
    for name in ("logger", "reducer"):  # what holds the hooks
        model.__dict__.pop(name, None)
    model.register_forward_pre_hook(_refuse)


def _refuse(*called_with: Any) -> None:
    raise RuntimeError("this DistributedDataParallel was replaced by regroup: use the one that regroup was given")


def dense_parameters(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """All parameters whose gradients pass through the sieve, by name, the model's last one first.

    This is roughly the order in which gradients become ready, and the order of DDP's buckets.
    """
    sparse = {
        id(module.weight)
        for module in model.module.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    ignored: set[str] = model.parameters_to_ignore
    found = {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and id(parameter) not in sparse and name not in ignored
    }
    if not found:
        raise BadInput("ddp_model must have a parameter with a dense gradient, got none")
    for name, parameter in found.items():
        if parameter.dtype not in ops.GRAD_DTYPES:
            raise BadType(f"parameter {name} must be a real floating-point tensor, got {parameter.dtype}")
    devices = {parameter.device for parameter in found.values()}
    if len(devices) > 1:
        raise BadInput(f"ddp_model must be on one device, got {sorted(map(str, devices))}")
    return dict(reversed(found.items()))


def layout_of(model: DistributedDataParallel) -> Layout:
    """The layout of a model's gradients."""
    unused = bool(model.find_unused_parameters or model.static_graph)
    return Layout(dense_parameters(model).values(), apart=unused)


def labels_in_order(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """What must be the same on all workers, in the model's order."""
    return labels_of(dict(reversed(list(parameters.items()))))
