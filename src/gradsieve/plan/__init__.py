"""Is it worth it on your network? A cost model of each way to train, and what it recommends."""

from gradsieve.plan.links import Link
from gradsieve.plan.outcome import Plan
from gradsieve.plan.planning import plan

__all__ = ["Link", "Plan", "plan"]
