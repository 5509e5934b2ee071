"""The same initial weights for all replicas: those of worker 0."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from gradsieve.comm.collectives import Program
from gradsieve.regrouping import broadcast_from
from gradsieve.state.handshake import handshake


def broadcast_(tensors: Sequence[Tensor]) -> Program[None]:
    """Replace every tensor by that of worker 0, integers included."""
    yield from broadcast_from(0, tensors)


def start_alike_(tensors: Sequence[Tensor], labels: Mapping[str, str], rank: int, world_size: int) -> Program[None]:
    """As `broadcast_`, after a comparison of labels and shapes: other sizes would end the process."""
    shapes = str([list(tensor.shape) for tensor in tensors])
    yield from handshake(rank, world_size, {**labels, "shapes": shapes})
    yield from broadcast_(tensors)
