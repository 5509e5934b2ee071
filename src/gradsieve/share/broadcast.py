"""The same initial weights for all replicas: those of worker 0."""

from collections.abc import Sequence

from torch import Tensor

from gradsieve.comm.collectives import Program
from gradsieve.regrouping import broadcast_from


def broadcast_(tensors: Sequence[Tensor]) -> Program[None]:
    """Replace every tensor by that of worker 0, integers included."""
    yield from broadcast_from(0, tensors)
