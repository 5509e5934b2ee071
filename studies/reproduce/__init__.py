"""Experiments that end in a verdict, one per module."""

from studies.reproduce import (
    ablation,
    accuracy,
    batch,
    breakdown,
    cost,
    density,
    density_control,
    fig1,
    hetero,
    imbalance,
    randomk,
    table1,
)
from studies.reproduce.base import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    each.id: each
    for each in (
        *fig1.EXPERIMENTS,
        hetero.EXPERIMENT,
        *density.EXPERIMENTS,
        imbalance.EXPERIMENT,
        cost.EXPERIMENT,
        breakdown.EXPERIMENT,
        batch.EXPERIMENT,
        randomk.EXPERIMENT,
        *accuracy.EXPERIMENTS,
        ablation.EXPERIMENT,
        table1.EXPERIMENT,
        density_control.EXPERIMENT,
    )
}
