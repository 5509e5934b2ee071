"""Gradients of models that `fully_shard` spreads over a node: one sparse exchange between the nodes."""

from gradsieve.fsdp.attach import attach, group_of, is_fully_sharded
from gradsieve.fsdp.hook import ShardHook

__all__ = ["ShardHook", "attach", "group_of", "is_fully_sharded"]
