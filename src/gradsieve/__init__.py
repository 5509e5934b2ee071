"""Data-parallel PyTorch training over slow networks: send only the part of the gradient that matters."""

from gradsieve._version import __version__
from gradsieve.collectives import AllGather, AllReduce, Broadcast, Program
from gradsieve.exchange import Exchanged
from gradsieve.reducer import SparseReducer, StepReport
from gradsieve.sparsifiers import SPARSIFIERS, Sparsifier, Step, Window, make_sparsifier
from gradsieve.worlds import Meter, ProcessGroupWorld, VirtualWorld, WorkersDiverged

__all__ = [
    "SPARSIFIERS",
    "AllGather",
    "AllReduce",
    "Broadcast",
    "Exchanged",
    "Meter",
    "ProcessGroupWorld",
    "Program",
    "SparseReducer",
    "Sparsifier",
    "Step",
    "StepReport",
    "VirtualWorld",
    "Window",
    "WorkersDiverged",
    "__version__",
    "make_sparsifier",
]
