"""A checkpoint of another number of ranks: each new rank starts with the mean of the old ones' vectors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradsieve.state.parts import opened, tensor_name


def averaged(value: Any, path: str, place: Path, manifest: dict[str, Any]) -> Any:
    """A rank's state with the mean over all ranks in place of every vector of the model's length."""
    if isinstance(value, Mapping):
        return {key: averaged(part, tensor_name(path, key), place, manifest) for key, part in value.items()}
    if isinstance(value, Tensor) and value.is_floating_point() and value.shape == (manifest["n"],):
        return _mean(place, manifest, path).to(value.dtype)
    return value


def _mean(place: Path, manifest: dict[str, Any], name: str) -> Tensor:
    """Each new rank starts with the mean of the old ranks' vectors, summed in float64, one file at a time."""
    total = torch.zeros(manifest["n"], dtype=torch.float64)
    for rank in range(manifest["world_size"]):
        with opened(place, f"rank-{rank}", manifest["files"]) as tensors:
            total += tensors.get_tensor(name)
    mean: Tensor = total / manifest["world_size"]
    return mean
