"""Everything needed to write your own sparsifier, density or feedback, in one place: see CONTRIBUTING.md.

Base classes, the values that they receive and return, exchanges and collectives to combine picks, states, checks of
options, and helpers that most sparsifiers use.
"""

from gradsieve._check import BadInput, BadType, at_least, below_one, fraction, number, one_of, positive
from gradsieve.comm.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Program,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    immediately,
)
from gradsieve.comm.exchange import (
    agreed,
    dense,
    disjoint,
    gather_picks,
    leader,
    own_index,
    reduce_at,
    summed,
    union,
)
from gradsieve.comm.step import Decision, Magnitudes, Quota, Selection, Sent, Span, Step
from gradsieve.density.base import Density
from gradsieve.feedback import Feedback
from gradsieve.sparsifiers.base import NOTHING, Shape, Sparsifier, Window, largest, select_from, vector_norm
from gradsieve.states import State, local, shared

__all__ = [
    "NOTHING",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "BadInput",
    "BadType",
    "Broadcast",
    "Decision",
    "Density",
    "Feedback",
    "Magnitudes",
    "Program",
    "Quota",
    "Selection",
    "Sent",
    "Shape",
    "Span",
    "Sparsifier",
    "State",
    "Step",
    "Window",
    "agreed",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "at_least",
    "below_one",
    "broadcast",
    "dense",
    "disjoint",
    "fraction",
    "gather_picks",
    "immediately",
    "largest",
    "leader",
    "local",
    "number",
    "one_of",
    "own_index",
    "positive",
    "reduce_at",
    "select_from",
    "shared",
    "summed",
    "union",
    "vector_norm",
]
