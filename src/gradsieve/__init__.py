"""Data-parallel PyTorch training over slow networks: exchange only the part of the model that matters."""

from gradsieve._version import __version__
from gradsieve.comm.step import Selection, Sent
from gradsieve.ddp import Sieve, sparsify
from gradsieve.density import Budget, dgc_warm_up
from gradsieve.feedback import LowPass, Momentum, Plain
from gradsieve.plan import Plan, plan
from gradsieve.reducer import SparseReducer
from gradsieve.regrouping import Regrouped
from gradsieve.reports import StepReport
from gradsieve.share import Auto, NonFiniteWeights, ReplicaAdamW, ShareReport, ShareSieve, share
from gradsieve.sparsifiers import SPARSIFIERS, Sparsifier, Step, make_sparsifier
from gradsieve.state.checkpoint import CheckpointError
from gradsieve.state.replicas import ReplicasDiffer
from gradsieve.totals import Totals
from gradsieve.virtual import virtual_reducers
from gradsieve.worlds import Meter, PeerLost, ProcessGroupWorld, VirtualWorld, WorkersDiverged

__all__ = [
    "SPARSIFIERS",
    "Auto",
    "Budget",
    "CheckpointError",
    "LowPass",
    "Meter",
    "Momentum",
    "NonFiniteWeights",
    "PeerLost",
    "Plain",
    "Plan",
    "ProcessGroupWorld",
    "Regrouped",
    "ReplicaAdamW",
    "ReplicasDiffer",
    "Selection",
    "Sent",
    "ShareReport",
    "ShareSieve",
    "Sieve",
    "SparseReducer",
    "Sparsifier",
    "Step",
    "StepReport",
    "Totals",
    "VirtualWorld",
    "WorkersDiverged",
    "__version__",
    "dgc_warm_up",
    "make_sparsifier",
    "plan",
    "share",
    "sparsify",
    "virtual_reducers",
]
