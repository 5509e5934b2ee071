"""One replica's weights as one vector that is never made: parameters stay where they are, beside `shared`."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.exchange import Span

Where: TypeAlias = Tensor | slice  # rising positions, or a part of the vector


@dataclass(frozen=True)
class Part:
    """The share of one parameter in some entries: where in the parameter, and where among the entries."""

    parameter: Tensor
    inside: Where
    among: slice


@dataclass(frozen=True)
class Entries:
    """Entries of the vector, and the parameters that they belong to."""

    where: Where
    parts: list[Part]

    def __len__(self) -> int:
        return self.where.stop - self.where.start if isinstance(self.where, slice) else len(self.where)


class Weights:
    """The parameters of a replica, and `shared`, the last agreed value of each of their elements.

    `shared` is float32 whatever the parameters are (float64 beside float64). Drift is taken at the precision of the
    weights, `shared` rounded to their type minus the weights: a mean that lies between two bfloat16 numbers stays
    in `shared`, so small steps that replicas agree on add up there until they show.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = {name: each for name, each in parameters.items() if local(each).numel()}
        if not self.parameters:
            raise ValueError("there must be a parameter to share, got none")
        for name, parameter in self.parameters.items():
            _check(name, parameter)
        devices = {str(parameter.device) for parameter in self.parameters.values()}
        if len(devices) > 1:
            raise ValueError(f"parameters must be on one device, got {sorted(devices)}")
        self.sizes = [local(parameter).numel() for parameter in self.parameters.values()]
        self.starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self.n = sum(self.sizes)
        first = flat(next(iter(self.parameters.values())))
        self._starts = torch.tensor(self.starts, device=first.device)
        wide = any(parameter.dtype == torch.float64 for parameter in self.parameters.values())
        self.shared = torch.empty(self.n, dtype=torch.float64 if wide else torch.float32, device=first.device)
        self._alike = all(parameter.dtype == self.shared.dtype for parameter in self.parameters.values())
        self.agree_()

    def agree_(self) -> None:
        """Take the weights as they are for the agreed ones."""
        for parameter, agreed in zip(self.parameters.values(), self.shared.split(self.sizes), strict=True):
            agreed.copy_(flat(parameter))

    def name_of(self, position: int) -> str:
        """The parameter that a position of the vector belongs to."""
        return list(self.parameters)[int(torch.searchsorted(self._starts, position, right=True)) - 1]

    def by_name(self) -> dict[str, Tensor]:
        """The agreed weights of each parameter, flat."""
        return dict(zip(self.parameters, self.shared.split(self.sizes), strict=True))

    @property
    def all(self) -> Entries:
        return self.entries(slice(0, self.n))

    def entries(self, where: Where) -> Entries:
        """The entries at rising positions, or of a part of the vector."""
        if isinstance(where, slice):
            edges = [min(max(start - where.start, 0), where.stop - where.start) for start in [*self.starts, self.n]]
        else:
            edges = [*torch.searchsorted(where, self._starts).tolist(), len(where)]
        parts = []
        for start, first, behind, parameter in zip(
            self.starts, edges, edges[1:], self.parameters.values(), strict=False
        ):
            if first == behind:
                continue
            inside: Where
            if isinstance(where, slice):
                inside = slice(where.start + first - start, where.start + behind - start)
            else:
                inside = where[first:behind] - start
            parts.append(Part(parameter, inside, slice(first, behind)))
        return Entries(where, parts)

    def read(self, entries: Entries) -> Tensor:
        """The weights at these entries, as wide as `shared`."""
        values = self.shared.new_empty(len(entries))
        for part in entries.parts:
            values[part.among] = flat(part.parameter)[part.inside]
        return values

    def write_(self, entries: Entries, values: Tensor) -> None:
        """Set the weights at these entries."""
        for part in entries.parts:
            target = flat(part.parameter)
            target[part.inside] = values[part.among].to(target.dtype)

    def rounded(self, entries: Entries, values: Tensor) -> Tensor:
        """The values as weights at these entries can hold them."""
        if self._alike:
            return values
        result = self.shared.new_empty(len(entries))
        for part in entries.parts:
            result[part.among] = values[part.among].to(part.parameter.dtype).to(result.dtype)
        return result

    def drift(self, entries: Entries, own: Tensor) -> Tensor:
        """How far this replica's `own` weights at these entries are from the agreed ones, in float32."""
        return (self.rounded(entries, self.shared[entries.where]) - own).float()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Within it the parameters hold the agreed weights; afterwards the replica's own are back."""
        entries = self.all
        own = self.read(entries)
        self.write_(entries, self.shared)
        try:
            yield
        finally:
            self.write_(entries, own)


class Drift:
    """What a worker looks at in a round: its own part of the drift. Nothing of that size is made.

    `bad` is the first position found whose drift is not finite, or -1. `second` says what second moment the
    optimizer keeps for a parameter: drift then counts times its fourth root, which is about as much as it changes
    the loss, as the root of the second moment stands for the curvature.
    """

    def __init__(
        self, weights: Weights, span: Span, second: Callable[[Tensor], Tensor | None] | None = None
    ) -> None:
        self.weights, self.span, self.second, self.bad = weights, span, second, -1
        self._positions, self._values = torch.empty(0, dtype=torch.int64), torch.empty(0)

    def histogram(self) -> Tensor:
        counts = torch.zeros(ops.BINS, dtype=torch.int64, device=self.weights.shared.device)
        self._find(math.inf, counts)
        return counts

    def above(self, threshold: float) -> Tensor:
        self._positions, self._values = self._find(threshold, None)
        return self._positions

    def at(self, positions: Tensor) -> Tensor:
        if positions is self._positions:
            return self._values
        return self._values[torch.searchsorted(self._positions, positions)]

    def _second(self, parameter: Tensor) -> Tensor | None:
        if self.second is None:
            return None
        found = self.second(parameter)
        return torch.zeros_like(flat(parameter)) if found is None else flat(found)  # a parameter without gradients

    def _find(self, threshold: float, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        found = []
        for part in self.weights.entries(slice(*self.span)).parts:
            assert isinstance(part.inside, slice)
            start, own = self.span[0] + part.among.start - part.inside.start, flat(part.parameter)
            positions, values, bad = ops.drift_select(
                self.weights.shared[start : start + len(own)],
                own,
                threshold,
                part.inside.start,
                part.inside.stop,
                second=self._second(part.parameter),
                counts=counts,
            )
            found.append((positions + start, values))
            if self.bad < 0 <= bad:
                self.bad = start + bad
        if not found:
            return self.weights.shared.new_empty(0, dtype=torch.int64), self.weights.shared.new_empty(0).float()
        positions, values = (torch.cat(each) for each in zip(*found, strict=True))
        return positions, values


def local(parameter: Tensor) -> Tensor:
    """The data of a parameter that are in this process: all, or this rank's shard of a DTensor."""
    data = parameter.detach()
    return data.to_local() if hasattr(data, "to_local") else data


def flat(parameter: Tensor) -> Tensor:
    """A parameter's elements in the order of memory, which need not be that of its dimensions (channels_last)."""
    data = local(parameter)
    return data.view(-1) if data.is_contiguous() else data.as_strided((data.numel(),), (1,))


def _check(name: str, parameter: Tensor) -> None:
    data = local(parameter)
    if data.dtype not in ops.GRAD_DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in ops.GRAD_DTYPES)
        raise TypeError(f"parameter {name} must be one of {known}, got {str(data.dtype).removeprefix('torch.')}")
    reach = sum((size - 1) * stride for size, stride in zip(data.shape, data.stride(), strict=True)) + 1
    if not data.is_contiguous() and reach != data.numel():
        raise ValueError(
            f"parameter {name} must fill its memory without gaps, got shape {tuple(data.shape)} "
            f"with strides {data.stride()}"
        )


def describe(name: str, parameter: Tensor) -> str:
    """What must be the same on all workers."""
    data = local(parameter)
    order = "" if data.is_contiguous() else f" strides {list(data.stride())}"
    return f"{name} {list(data.shape)}{order} {str(data.dtype).removeprefix('torch.')}"
