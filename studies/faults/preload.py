"""Imported once by the fork server of a campaign: its workers begin with every kernel loaded."""

from gradsieve import ops
from studies.faults import worker

ops.warm_up()

__all__ = ["worker"]
