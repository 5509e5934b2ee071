"""Dense steps: gradients are averaged before the optimizer sees them, as in plain data-parallel training."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsieve._check import BadInput
from gradsieve.comm.collectives import Program, all_reduce
from gradsieve.share.average import average_
from gradsieve.share.weights import local


def average_gradients_(parameters: Sequence[Tensor], *, takes_part: bool = True) -> Program[int]:
    """The mean of all workers' gradients in place of this worker's; returns how many workers took part.

    A worker that skips its step (`takes_part=False`) adds nothing, and the mean is over the others. A parameter
    that no worker has a gradient for keeps none.
    """
    own = torch.tensor([float(takes_part)], dtype=torch.float32, device=local(parameters[0]).device)
    count = yield from all_reduce("gradients", own)
    workers = int(count)
    gradients = [_gradient(parameter, takes_part) for parameter in parameters]
    yield from average_(gradients, max(workers, 1))
    for parameter, mean in zip(parameters, gradients, strict=True):
        if takes_part and parameter.grad is None and bool(mean.any()):
            parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).copy_(mean)
    return workers


def _gradient(parameter: Tensor, takes_part: bool) -> Tensor:
    """This worker's gradient itself, or zeros."""
    if parameter.grad is None or not takes_part:
        return torch.zeros_like(local(parameter))
    if parameter.grad.is_sparse:
        raise BadInput("dense_steps needs dense gradients, got a sparse one: leave dense_steps out")
    return local(parameter.grad)
