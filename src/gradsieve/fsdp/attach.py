"""Checks of models of `fully_shard`, and the hooks that give access to their gradients."""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from gradsieve import ops
from gradsieve._check import BadInput, BadType
from gradsieve.fsdp.hook import ShardHook
from gradsieve.reducer import SparseReducer
from gradsieve.share.weights import labels_of, local, shard_of
from gradsieve.state.handshake import handshake
from gradsieve.state.replicas import check_replicas
from gradsieve.worlds import ProcessGroupWorld, group_of

WAY_OUT = 'apply fully_shard with the mesh of a node only, mesh["shard"], and give process_group=mesh["replicate"]'
MakeReducer = Callable[[ProcessGroupWorld, list[int], Mapping[str, str]], SparseReducer]


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module or to a part of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whoever applied it has imported it
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def attach(
    model: nn.Module, make: MakeReducer, process_group: Any, timeout: float, *, scaler: Any, check_every: int
) -> ShardHook:
    """Exchange the gradients of a model over the group of replicas; `make` builds the reducer of this rank."""
    if process_group is None:
        raise BadInput(
            'process_group must be the ranks that hold the same shard, as in process_group=mesh["replicate"], '
            "for a model of fully_shard, got None"
        )
    parameters = _parameters(model)
    first: Any = next(iter(parameters.values()))
    mesh = first.device_mesh
    world = ProcessGroupWorld(group_of(process_group), timeout, device=local(first).device)
    place = shard_of(first)
    sizes = [local(parameter).numel() for parameter in parameters.values()]
    reducer = make(world, sizes, labels_of(parameters))
    hook = ShardHook(reducer, world, parameters, mesh.get_group(), scaler=scaler, check_every=check_every)
    hook.part = place.replace(" ", "-")
    world.run([handshake(world.rank, world.size, {"shard": place})])
    if all(local(parameter).device.type != "meta" for parameter in parameters.values()):
        world.run([check_replicas({name: local(each) for name, each in parameters.items()}, 0)])
    _watch(model, hook)
    model.register_forward_pre_hook(hook.drop_unfinished)
    return hook


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All trainable parameters, each sharded over the same ranks."""
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not found:
        raise BadInput("model must have a trainable parameter, got none")
    meshes = set()
    for name, parameter in found.items():
        mesh: Any = getattr(parameter, "device_mesh", None)
        placements: Any = getattr(parameter, "placements", None)
        if mesh is None:
            raise BadInput(
                f"parameter {name} must be sharded by fully_shard, got one that is not: shard the root too"
            )
        if mesh.ndim != 1:
            raise BadInput(f"parameter {name} must be sharded over one dimension, got {mesh.ndim}: {WAY_OUT}")
        if not placements[0].is_shard():
            raise BadInput(
                f"parameter {name} must be sharded by fully_shard, got composable replicate: "
                "wrap the model with DistributedDataParallel instead"
            )
        if local(parameter).dtype not in ops.GRAD_DTYPES:
            raise BadType(f"parameter {name} must be a real floating-point tensor, got {parameter.dtype}")
        meshes.add(mesh)
    if len(meshes) > 1:
        raise BadInput(f"all parameters must be sharded over the same ranks, got {len(meshes)} meshes")
    if not sum(local(parameter).numel() for parameter in found.values()):
        raise BadInput("every rank must hold a part of the model, got a rank whose shards are all empty")
    return found


def _watch(model: nn.Module, hook: ShardHook) -> None:
    """Call the hook when an FSDP module's gradients are ready."""
    from torch.distributed.fsdp import FSDPModule

    managed: set[int] = set()
    for module in reversed(list(model.modules())):  # inner ones first: each manages what those leave
        if isinstance(module, FSDPModule):
            assert isinstance(module, nn.Module)
            own = [each for each in module.parameters() if id(each) not in managed and each.requires_grad]
            managed |= {id(each) for each in own}
            try:
                module.set_all_reduce_hook(functools.partial(hook.on_ready, own))
            except ValueError as problem:  # several parameter groups
                raise BadInput(
                    f"{type(module).__name__} must have one parameter group, got several meshes in a fully_shard: "
                    "apply fully_shard to each part on its own"
                ) from problem
