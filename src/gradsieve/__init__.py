"""Data-parallel PyTorch training over slow networks: send only the part of the gradient that matters."""

from gradsieve._version import __version__
from gradsieve.checkpoint import CheckpointError
from gradsieve.collectives import AllGather, AllReduce, AllToAll, Broadcast, Program
from gradsieve.ddp import Sieve, sparsify
from gradsieve.exchange import Exchanged
from gradsieve.reducer import SparseReducer
from gradsieve.replicas import ReplicasDiffer
from gradsieve.schedules import dgc_warm_up
from gradsieve.share import Auto, NonFiniteWeights, ReplicaAdamW, ShareReport, ShareSieve, share
from gradsieve.sparsifiers import SPARSIFIERS, Sparsifier, Step, Window, make_sparsifier
from gradsieve.steps import StepReport
from gradsieve.worlds import Meter, ProcessGroupWorld, VirtualWorld, WorkersDiverged

__all__ = [
    "SPARSIFIERS",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Auto",
    "Broadcast",
    "CheckpointError",
    "Exchanged",
    "Meter",
    "NonFiniteWeights",
    "ProcessGroupWorld",
    "Program",
    "ReplicaAdamW",
    "ReplicasDiffer",
    "ShareReport",
    "ShareSieve",
    "Sieve",
    "SparseReducer",
    "Sparsifier",
    "Step",
    "StepReport",
    "VirtualWorld",
    "Window",
    "WorkersDiverged",
    "__version__",
    "dgc_warm_up",
    "make_sparsifier",
    "share",
    "sparsify",
]
