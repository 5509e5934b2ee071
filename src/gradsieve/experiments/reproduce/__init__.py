"""Experiments that end in a verdict, one a module."""

from gradsieve.experiments.reproduce import density_control
from gradsieve.experiments.reproduce.base import Experiment

EXPERIMENTS: dict[str, Experiment] = {each.id: each for each in (density_control.EXPERIMENT,)}
