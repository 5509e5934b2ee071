"""Imported once by the fork server of a campaign: its workers start with everything loaded."""

import torch._dynamo  # the first optimizer of a process imports it, which would cost seconds per worker

from gradsieve import ops
from gradsieve_lab import cli
from gradsieve_lab.runs import running  # noqa: F401
from studies.faults import kinds, worker

ops.warm_up()

__all__ = ["cli", "kinds", "torch", "worker"]
