"""Gradients of models that `fully_shard` spreads over a node: one sparse exchange between the nodes."""

from gradsieve.fsdp.attach import attach, is_fully_sharded
from gradsieve.fsdp.hook import ShardHook

__all__ = ["ShardHook", "attach", "is_fully_sharded"]
