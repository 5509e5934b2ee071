"""Exchange of weights between workers that each train a replica of their own."""

from gradsieve.share.adamw import ReplicaAdamW
from gradsieve.share.attach import share
from gradsieve.share.auto import Auto
from gradsieve.share.outcome import NonFiniteWeights, ShareReport
from gradsieve.share.replica import Replica
from gradsieve.share.sieve import ShareSieve

__all__ = ["Auto", "NonFiniteWeights", "Replica", "ReplicaAdamW", "ShareReport", "ShareSieve", "share"]
