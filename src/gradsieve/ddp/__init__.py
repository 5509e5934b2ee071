"""Gradients, through a communication hook of DistributedDataParallel."""

from gradsieve.ddp.sieve import Sieve, sparsify

__all__ = ["Sieve", "sparsify"]
