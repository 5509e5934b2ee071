"""A worker's part of a checkpoint, for methods without a residual."""

from typing import Any

import torch

from gradsieve_lab.runs.config import Config


def bare_state(settings: Config, rank: int, world_size: int, step: int) -> dict[str, Any]:
    """The minimum that `gradsieve.checkpoint` requires."""
    return {
        "rank": rank,
        "world_size": world_size,
        "step": step,
        "sparsifier": settings.sparsifier,
        "options": settings.options,
        "n": 0,
        "residual": torch.empty(0),
    }
