"""All workers' reducers in one process, for experiments and tests."""

from typing import Any

from gradsieve._check import BadInput, at_least, dict_of
from gradsieve.density import Density, Schedule
from gradsieve.reducer import SparseReducer
from gradsieve.sparsifiers import Sparsifier, as_sparsifier

MOST_WORKERS = 1 << 16


def virtual_reducers(
    sparsifier: str | Sparsifier[Any],
    density: float | Schedule | Density = 1e-3,
    *,
    world_size: int,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> list[SparseReducer]:
    """One reducer per virtual worker; `options` are the sparsifier's, `settings` those of `SparseReducer`.

    >>> import torch
    >>> from gradsieve import VirtualWorld
    >>> reducers = virtual_reducers("exdyna", 0.5, world_size=2)
    >>> grads = [torch.tensor([4.0, 1.0]), torch.tensor([2.0, 1.0])]
    >>> VirtualWorld(2).run([reducer.reduce(grad) for reducer, grad in zip(reducers, grads)])[0]
    tensor([3., 0.])
    """
    if at_least("world_size", world_size, 1) > MOST_WORKERS:
        raise BadInput(f"world_size must be at most {MOST_WORKERS:,}, as all are in this process, got {world_size}")
    if "rank" in settings:
        raise BadInput(f"rank must be left out, as there is a reducer for every rank, got {settings['rank']!r}")
    made = as_sparsifier(sparsifier, dict_of("options", options))
    return [
        SparseReducer(made, density, rank=rank, world_size=world_size, **settings) for rank in range(world_size)
    ]
