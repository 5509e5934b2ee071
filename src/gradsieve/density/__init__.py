"""How much each step sends: a constant, a function of the step, or a budget for the whole run."""

from gradsieve.density.base import Constant, Density, Schedule, as_density
from gradsieve.density.budget import Budget
from gradsieve.density.warm_up import dgc_warm_up

__all__ = ["Budget", "Constant", "Density", "Schedule", "as_density", "dgc_warm_up"]
