"""What ranks report to each other while a checkpoint is written or read: an error on one rank is raised on all."""

import json
from collections.abc import Callable, Sequence

import torch

from gradsieve.comm.collectives import Program, all_gather

# Exchanges a text with the ranks that save other shards of the same model; returns those of all shards, in order.
Beside = Callable[[str], list[str]]


def alone(text: str) -> list[str]:
    """There are no other shards."""
    return [text]


def tell(text: str) -> Program[list[str]]:
    """Gather a message of every rank, in rank order; also a barrier."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8)
    replies = yield from all_gather("checkpoint", own)
    return [bytes(reply.tolist()).decode() for reply in replies]


def first_error(errors: Sequence[str], beside: Beside) -> tuple[str, str]:
    """The first error on any rank of any shard, and whose it is, the same on all; empty if there is none."""
    own = next(([f"rank {rank}", text] for rank, text in enumerate(errors) if text), ["", ""])
    found = [json.loads(text) for text in beside(json.dumps(own))]
    for shard, (rank, text) in enumerate(found):
        if text:
            return text, rank if len(found) == 1 else f"{rank} of shard {shard}"
    return "", ""
