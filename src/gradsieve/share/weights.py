"""One replica's weights, addressed as one vector: parameters stay where they are, only `shared` is a vector."""

import bisect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve._check import BadInput, BadType
from gradsieve.comm.step import Span

Where: TypeAlias = Tensor | slice  # rising positions, or a part of the vector


class Weights:
    """The parameters of a replica, and `shared`, the last agreed value of each of their elements.

    `shared` is float32 for all types of parameters (float64 if one is float64). Drift is computed at the precision
    of the weights, `shared` rounded to their type minus the weights: a mean between two bfloat16 numbers stays in
    `shared`, so small steps on which replicas agree add up there until they reach the next number.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = {name: each for name, each in parameters.items() if local(each).numel()}
        if not self.parameters:
            raise BadInput("there must be a parameter to share, got none")
        for name, parameter in self.parameters.items():
            _check(name, parameter)
        devices = {str(parameter.device) for parameter in self.parameters.values()}
        if len(devices) > 1:
            raise BadInput(f"parameters must be on one device, got {sorted(devices)}")
        self.sizes = [local(parameter).numel() for parameter in self.parameters.values()]
        self.starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self.n = sum(self.sizes)
        self._pieces = [flat(parameter) for parameter in self.parameters.values()]
        first = self._pieces[0]
        self._starts = torch.tensor(self.starts, device=first.device)
        wide = any(parameter.dtype == torch.float64 for parameter in self.parameters.values())
        self.shared = torch.empty(self.n, dtype=torch.float64 if wide else torch.float32, device=first.device)
        self._alike = all(parameter.dtype == self.shared.dtype for parameter in self.parameters.values())
        self._dtypes = list(dict.fromkeys(parameter.dtype for parameter in self.parameters.values()))
        kinds = [self._dtypes.index(parameter.dtype) for parameter in self.parameters.values()]
        self._kinds = torch.tensor(kinds, device=first.device)
        self.agree_()

    def agree_(self) -> None:
        """Make the current weights the agreed ones."""
        for parameter, agreed in zip(self.parameters.values(), self.shared.split(self.sizes), strict=True):
            agreed.copy_(flat(parameter))

    def name_of(self, position: int) -> str:
        """The parameter that a position of the vector belongs to."""
        return list(self.parameters)[bisect.bisect_right(self.starts, position) - 1]

    def by_name(self) -> dict[str, Tensor]:
        """The agreed weights of each parameter, flat."""
        return dict(zip(self.parameters, self.shared.split(self.sizes), strict=True))

    @property
    def all(self) -> slice:
        return slice(0, self.n)

    @property
    def pieces(self) -> list[Tensor]:
        """The elements of each parameter, flat, not copied. Looked up each time: a user may replace `.data`."""
        for place, (parameter, piece) in enumerate(zip(self.parameters.values(), self._pieces, strict=True)):
            if is_sharded(parameter) or parameter.data_ptr() != piece.data_ptr():
                self._pieces[place] = flat(parameter)
        return self._pieces

    def read(self, where: Where) -> Tensor:
        """The weights there, in the type of `shared`."""
        if isinstance(where, Tensor):
            return ops.gather_pieces(self.pieces, where)
        values = self.shared.new_empty(where.stop - where.start)
        for piece, inside, among in self._cut(where):
            values[among] = piece[inside]
        return values

    def write_(self, where: Where, values: Tensor) -> None:
        """Set the weights there."""
        if isinstance(where, Tensor):
            ops.scatter_pieces_(self.pieces, where, values)
            return
        for piece, inside, among in self._cut(where):
            piece[inside] = values[among].to(piece.dtype)

    def rounded(self, where: Where, values: Tensor) -> Tensor:
        """The values, rounded to the types of the weights there."""
        if self._alike:
            return values
        result = values.clone()
        if isinstance(where, slice):
            for piece, _, among in self._cut(where):
                result[among] = values[among].to(piece.dtype).to(values.dtype)
            return result
        kinds = self._kinds[torch.searchsorted(self._starts, where, right=True) - 1]
        for number, dtype in enumerate(self._dtypes):
            result = torch.where(kinds == number, values.to(dtype).to(values.dtype), result)
        return result

    def _cut(self, where: slice) -> Iterator[tuple[Tensor, slice, slice]]:
        """The pieces in a part of the vector: each itself, where in it, and where in the part."""
        for piece, start in zip(self.pieces, self.starts, strict=True):
            first, behind = max(start, where.start), min(start + len(piece), where.stop)
            if first < behind:
                yield piece, slice(first - start, behind - start), slice(first - where.start, behind - where.start)

    def drift(self, where: Where, own: Tensor) -> Tensor:
        """How far this replica's `own` weights there are from the agreed ones, in float32."""
        return (self.rounded(where, self.shared[where]) - own).float()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """A context in which the parameters hold the agreed weights; afterwards the replica's own are restored."""
        own = self.read(self.all)
        self.write_(self.all, self.shared)
        try:
            yield
        finally:
            self.write_(self.all, own)


class Drift:
    """The part of the drift that a worker searches in a round, computed on the fly without a vector of that size.

    `bad` is the first position found whose drift is not finite, or -1. `second` returns the second moment that the
    optimizer keeps for a parameter: the drift is then multiplied by its fourth root. That approximates the effect
    on the loss, as the root of the second moment approximates the curvature.
    """

    def __init__(
        self, weights: Weights, span: Span, second: Callable[[Tensor], Tensor | None] | None = None
    ) -> None:
        self.weights, self.span, self.second = weights, span, second
        self.bad = weights.shared.new_full((), -1, dtype=torch.int64)
        self._positions, self._values = self.bad.new_empty(0), weights.shared.new_empty(0, dtype=torch.float32)

    def histogram(self) -> Tensor:
        counts = torch.zeros(ops.BINS, dtype=torch.int64, device=self.weights.shared.device)
        self._find(math.inf, counts, 0)
        return counts

    def hits(self, threshold: float) -> Tensor:
        """As `above`, on a CPU. On other devices nothing: the host would wait to learn how many there are."""
        if not self.weights.shared.is_cpu:
            return self._positions
        return self.above(threshold, None)

    def above(self, threshold: float, count: int | None) -> Tensor:
        self._positions, self._values = self._find(threshold, None, count)
        return self._positions

    def at(self, positions: Tensor) -> Tensor:
        if positions is self._positions:
            return self._values
        return self._values[torch.searchsorted(self._positions, positions)]

    def _find(self, threshold: float, counts: Tensor | None, count: int | None) -> tuple[Tensor, Tensor]:
        pieces, second = self.weights.pieces, []
        if self.second is not None:
            found = map(self.second, self.weights.parameters.values())
            second = [pieces[0].new_empty(0) if moment is None else flat(moment) for moment in found]
        positions, values, bad = ops.drift_select(
            self.weights.shared, pieces, threshold, *self.span, second=second, counts=counts, count=count
        )
        self.bad = torch.where(self.bad < 0, bad, self.bad)
        return positions, values


def is_sharded(parameter: Any) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(parameter, "to_local")


def shard_of(parameter: Any) -> str:
    """Which part of a DTensor this rank holds, such as "shard 0 of 2"; empty for other tensors."""
    if not is_sharded(parameter):
        return ""
    place, size = (
        (*map(str, each),) for each in (parameter.device_mesh.get_coordinate(), parameter.device_mesh.shape)
    )
    return f"shard {','.join(place)} of {','.join(size)}"


def local(parameter: Tensor) -> Tensor:
    """The part of a parameter in this process: all of it, or this rank's shard of a DTensor."""
    data: Any = parameter.detach()
    result: Tensor = data.to_local() if is_sharded(data) else data
    return result


def flat(parameter: Tensor) -> Tensor:
    """A parameter's elements in the order of memory, which need not be that of its dimensions (channels_last)."""
    data = local(parameter)
    return data.view(-1) if data.is_contiguous() else data.as_strided((data.numel(),), (1,))


def _check(name: str, parameter: Tensor) -> None:
    data = local(parameter)
    if data.dtype not in ops.GRAD_DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in ops.GRAD_DTYPES)
        raise BadType(f"parameter {name} must be one of {known}, got {str(data.dtype).removeprefix('torch.')}")
    reach = sum((size - 1) * stride for size, stride in zip(data.shape, data.stride(), strict=True)) + 1
    if not data.is_contiguous() and reach != data.numel():
        raise BadInput(
            f"parameter {name} must fill its memory without gaps, got shape {tuple(data.shape)} "
            f"with strides {data.stride()}"
        )


def labels_of(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """What must be the same on all workers: shapes, orders and types of parameters, and which shards they are."""
    shards = sorted({shard_of(parameter) for parameter in parameters.values()} - {""})
    described = [_describe(name, parameter) for name, parameter in parameters.items()]
    place = {"shard": "; ".join(shards)} if shards else {}
    return place | {f"parameter {number}": words for number, words in enumerate(described)}


def _describe(name: str, parameter: Tensor) -> str:
    data = local(parameter)
    order = "" if data.is_contiguous() else f" strides {list(data.stride())}"
    return f"{name} {list(data.shape)}{order} {str(data.dtype).removeprefix('torch.')}"
