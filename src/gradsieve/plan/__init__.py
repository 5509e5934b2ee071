"""Cost model: the step time of each way to train on a given network, and a recommendation."""

from gradsieve.plan.links import Link
from gradsieve.plan.outcome import Plan
from gradsieve.plan.planning import plan

__all__ = ["Link", "Plan", "plan"]
