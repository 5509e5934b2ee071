"""Check by checksums that all workers hold the same parameters: 8 bytes per parameter tensor."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gradsieve.comm.collectives import Program, all_gather

_CHUNK = 1 << 20
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64; products wrap around, which loses nothing to the comparison


class ReplicasDiffer(RuntimeError):
    """Workers hold different parameters: each trains another model."""


def checksum(x: Tensor) -> int:
    """A number that changes with any bit, and if two elements are exchanged."""
    bits = x.detach().reshape(-1).view(_INTEGERS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, len(bits), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        weights = torch.arange(start + 1, start + 1 + len(part), dtype=torch.int64, device=x.device) * _ODD
        total += ((part + 1) * (weights | 1)).sum()
    return int(total)


def check_replicas(parameters: Mapping[str, Tensor], step: int) -> Program[None]:
    """Compare all parameters over all workers; raises the same error on all if they differ."""
    own = torch.tensor([checksum(parameter) for parameter in parameters.values()], dtype=torch.int64)
    rows = yield from all_gather("replicas", own)
    for rank, row in enumerate(rows):
        for name, ours, theirs in zip(parameters, rows[0].tolist(), row.tolist(), strict=True):
            if ours != theirs:
                raise ReplicasDiffer(f"replicas differ at step {step}: {name} of rank {rank} is not that of rank 0")
