"""Before the first step: check that all workers have the same settings; the error lists the differences."""

import json
from typing import Any

import torch

from gradsieve._check import BadInput
from gradsieve.comm.collectives import Program, all_gather
from gradsieve.comm.step import Step


def handshake(rank: int, world_size: int, settings: dict[str, Any]) -> Program[None]:
    """Compare the settings of all workers; raises the same error on all if they differ."""
    text = json.dumps({"world_size": world_size, **settings}, default=str)
    own = torch.frombuffer(bytearray(_message(rank, text)), dtype=torch.uint8)
    replies = [reply.numpy().tobytes() for reply in (yield from all_gather("handshake", own))]
    if replies == [_message(position, text) for position in range(world_size)]:
        return
    found = [_parsed(reply) for reply in replies]
    if len(found) != world_size:
        raise BadInput(f"world_size must be the number of workers, {len(found)}, got {world_size}")
    for position, theirs in enumerate(found):
        if theirs["rank"] != position:
            raise BadInput(f"rank must be the worker's place in the world, {position}, got {theirs['rank']}")
        for name in dict.fromkeys([*found[0], *theirs]):
            ours, other = found[0].get(name, "none"), theirs.get(name, "none")
            if name != "rank" and ours != other:
                raise BadInput(f"workers disagree on {name}: rank 0 has {ours}, rank {position} has {other}")


def _message(rank: int, text: str) -> bytes:
    return f"{rank} {text}".encode()


def _parsed(message: bytes) -> dict[str, Any]:
    rank, text = message.decode().split(" ", 1)
    return {"rank": int(rank), **json.loads(text)}


def same_count(step: Step) -> Program[None]:
    """Compare how many elements workers send, if code of the user decides; raises the same error on all."""
    own = torch.tensor([[step.k, step.quota.expected]], dtype=torch.int64)
    rows = torch.cat((yield from all_gather("density", own, [1] * step.world_size))).tolist()
    for rank, row in enumerate(rows):
        for first, other in zip(rows[0], row, strict=True):
            if first != other:
                raise BadInput(
                    f"workers disagree on density in step {step.index}: rank 0 sends {first} of {step.n} elements, "
                    f"rank {rank} {other}; the density must be the same on all ranks"
                )
