"""Total error: what a scheme left unsent, compared with the minimum, and the bits that it sent.

The vectors on which a scheme decides, one per step, are *given*: the accumulators of a recorded run. The error of
a step is the sum of squares of the entries that are not sent in it. Of all ways to send a budget of entries over
all steps, sending the largest overall leaves the smallest total error, and that is one constant threshold.

Sahu et al., "Rethinking gradient sparsification as total error minimization", NeurIPS 2021.
"""

import math
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradsieve._check import BadInput, BadType, at_least, number, one_of
from gradsieve.comm.traffic import ring_all_reduce_bytes

Vectors: TypeAlias = Tensor | Iterable[Tensor | Sequence[float]]  # one per step, all of the same length
ACCOUNTINGS = ("values", "values+indices", "ring")


@dataclass(frozen=True)
class ConstantThreshold:
    """One threshold for all steps: entries above it are sent, entries below are not."""

    threshold: float  # the smallest magnitude that is sent; infinite if nothing is
    counts: list[int]  # how many entries each step sends
    total_error: float


def total_error(norms_squared: Tensor | Iterable[float | Tensor | Iterable[float]]) -> float:
    """`sum_t mean_r ||e_r,t||^2`: the sum over steps of the workers' mean squared norm of the residual.

    norms_squared: one number per step, as in records ("error"), or one per worker and step.

    >>> total_error([1.0, 2.5])
    3.5
    >>> total_error([[0.0, 2.0], [2.0, 3.0]])
    3.5
    """
    steps = [_mean_norm(f"norms_squared[{step}]", each) for step, each in enumerate(_plain(norms_squared))]
    if not steps:
        raise BadInput("norms_squared must hold at least one step, got none")
    return sum(steps)


def best_constant_threshold(sequence: Vectors, budget: int) -> ConstantThreshold:
    """The threshold that sends the `budget` largest magnitudes over all steps, found by selection, without a sort.

    Exactly `budget` entries are sent, or all if there are fewer. Of entries equal to the threshold, those of the
    first steps are sent; the choice does not change the error.

    >>> best_constant_threshold([[4.0, -3.0, 1.0], [0.5, 2.0, 0.0]], budget=3)
    ConstantThreshold(threshold=2.0, counts=[2, 1], total_error=1.25)
    """
    magnitudes = _magnitudes(sequence)
    budget = min(at_least("budget", budget, 0), magnitudes.numel())
    threshold = _largest(magnitudes.flatten(), budget)
    counts: list[int] = (magnitudes > threshold).sum(1).tolist()
    ties: list[int] = (magnitudes == threshold).sum(1).tolist()
    left = budget - sum(counts)
    for step, tied in enumerate(ties):
        taken = min(tied, left)
        counts[step] += taken
        left -= taken
    return ConstantThreshold(threshold, counts, _unsent(magnitudes, counts))


def topk_total_error(sequence: Vectors, budget: int) -> float:
    """The total error of Top-k: the budget is spread evenly over the steps, the remainder over the first ones.

    >>> topk_total_error([[4.0, -3.0, 1.0], [0.5, 2.0, 0.0]], budget=3)
    1.25
    >>> topk_total_error([[4.0, -3.0, 1.0], [0.5, 2.0, 0.0]], budget=2)
    10.25
    """
    magnitudes = _magnitudes(sequence)
    steps = len(magnitudes)
    each, remainder = divmod(min(at_least("budget", budget, 0), magnitudes.numel()), steps)
    return _unsent(magnitudes, [each + (step < remainder) for step in range(steps)])


def scheme_total_error(sequence: Vectors, counts: Sequence[int]) -> float:
    """The total error of sending the `counts[t]` largest magnitudes of step t.

    >>> scheme_total_error([[4.0, -3.0, 1.0], [0.5, 2.0, 0.0]], counts=[1, 2])
    10.0
    """
    magnitudes = _magnitudes(sequence)
    steps, n = magnitudes.shape
    if len(counts) != steps:
        raise BadInput(f"counts must hold one number for each of {steps} steps, got {len(counts)}")
    for step, count in enumerate(counts):
        if at_least(f"counts[{step}]", count, 0) > n:
            raise BadInput(f"counts[{step}] must be at most {n}, the entries of a step, got {count}")
    return _unsent(magnitudes, counts)


def bits(
    elements: int,
    accounting: str = "values+indices",
    *,
    workers: int | None = None,
    value_bits: int = 32,
    index_bits: int = 32,
) -> float:
    """Bits needed to send this many elements.

    accounting: "values" counts values only; "values+indices" a value and a position each, 64 bits by default;
    "ring" the mean bits that each of `workers` sends if together they picked `elements` distinct positions: an
    all-gather of positions and an all-reduce of values, without padding and lengths.
    index_bits: `packed_index_bits` returns the smallest possible number.

    >>> bits(1000, "values"), bits(1000), bits(1000, index_bits=packed_index_bits(500_000))
    (32000, 64000, 51000)
    >>> bits(1000, "ring", workers=4)
    72000.0
    """
    one_of("accounting", accounting, ACCOUNTINGS)
    elements = at_least("elements", elements, 0)
    values = elements * at_least("value_bits", value_bits, 1)
    indices = elements * at_least("index_bits", index_bits, 0)
    if accounting == "values":
        return values
    if accounting == "values+indices":
        return values + indices
    world_size = at_least("workers", workers, 1)
    return ring_all_reduce_bytes(values, world_size) + (world_size - 1) / world_size * indices


def packed_index_bits(n: int) -> int:
    """`ceil(log2(n))`: the bits of a position among n, if all positions take the same number of bits.

    >>> [packed_index_bits(n) for n in (1, 2, 1024, 1025)]
    [0, 1, 10, 11]
    """
    return (at_least("n", n, 1) - 1).bit_length()


def _magnitudes(sequence: Vectors) -> Tensor:
    """One row per step, in float64, where every float32 is exact and no square of one overflows."""
    rows = [_row(vector, step) for step, vector in enumerate(sequence)]
    if not rows:
        raise BadInput("sequence must hold at least one vector, got none")
    for step, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise BadInput(f"sequence[{step}] must be as long as the first, {len(rows[0])}, got {len(row)}")
    return torch.stack(rows).abs_()


def _row(vector: Any, step: int) -> Tensor:
    if isinstance(vector, Tensor) and vector.is_complex():
        raise BadType(f"sequence[{step}] must be real, got {vector.dtype}")
    try:
        row = torch.as_tensor(vector, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as problem:
        raise BadType(f"sequence[{step}] must be a vector of numbers, got {reprlib.repr(vector)}") from problem
    if row.dim() != 1 or not len(row):
        raise BadInput(f"sequence[{step}] must be a vector of at least one entry, got shape {tuple(row.shape)}")
    finite = row.isfinite()
    if not finite.all():
        raise BadInput(f"sequence[{step}] must be finite, got {row[~finite][0].item()}")
    return row


def _largest(magnitudes: Tensor, rank: int) -> float:
    """The `rank`-th largest magnitude, counted from 1; infinite for rank 0."""
    return float(magnitudes.kthvalue(len(magnitudes) - rank + 1).values) if rank else math.inf


def _unsent(magnitudes: Tensor, counts: Sequence[int]) -> float:
    """The sum of squares of the unsent entries if the `counts[t]` largest of each row are sent."""
    kept = (
        row.topk(len(row) - count, largest=False, sorted=False).values
        for row, count in zip(magnitudes, counts, strict=True)
    )
    return sum(float(row.square().sum()) for row in kept)


def _mean_norm(name: str, step: Any) -> float:
    """The mean over workers, or the single number given."""
    step = _plain(step)
    if not isinstance(step, Iterable):
        return _norm(name, step)
    norms = [_norm(f"{name}[{rank}]", norm) for rank, norm in enumerate(step)]
    if not norms:
        raise BadInput(f"{name} must hold at least one worker, got none")
    return sum(norms) / len(norms)


def _norm(name: str, value: Any) -> float:
    if not 0 <= number(name, _plain(value)) < math.inf:
        raise BadInput(f"{name} must be at least 0 and finite, got {value}")
    return float(value)


def _plain(values: Any) -> Any:
    """Convert tensors to Python numbers."""
    return values.tolist() if isinstance(values, Tensor) else values
