"""A sieve in a checkpoint of `torch.distributed.checkpoint`, which another number of ranks can read.

Every worker has vectors of its own, such as a residual. In the checkpoint they are the rows of DTensors, one row
per worker; numbers and strings are one JSON text per worker.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from gradsieve._check import BadInput
from gradsieve.comm.collectives import all_reduce
from gradsieve.ddp import Sieve
from gradsieve.share import ShareSieve
from gradsieve.share.parameters import part_of
from gradsieve.state.parts import CheckpointError, decoded, encoded
from gradsieve.worlds import ProcessGroupWorld

WORKERS = "workers"  # what the rows of all ranks are kept under, unless they hold different shards
_COMPARED = ("sparsifier", "options", "n")


class SieveState:
    """Makes a sieve a `Stateful`: `dcp.save({"sieve": SieveState(sieve)}, checkpoint_id=folder)`.

    To load, pass the folder twice: `dcp.load({"sieve": SieveState(sieve, folder)}, checkpoint_id=folder)`. The
    number of ranks may differ then: from n to m, `sum(residuals')/m == sum(residuals)/n`, and the same for
    weights. With the same number training continues bit for bit.

    Args:
        sieve: what `sparsify` or `share` returned.
        saved: to load, the checkpoint's folder, or a storage reader for it.
        extra: to save, what this rank saves in addition, such as its optimizer's state: dicts of numbers, strings,
            tensors. After loading, `extra` is what was saved (keys that were numbers are strings); with another
            number of ranks, that of rank r modulo the old number.
        key: the sieve's name in the checkpoint, if it has several.
    """

    def __init__(
        self,
        sieve: Sieve | ShareSieve,
        saved: Any = None,
        *,
        extra: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> None:
        if not isinstance(sieve, Sieve | ShareSieve):
            raise BadInput(f"sieve must be what sparsify or share returned, got {type(sieve).__name__}")
        self.sieve, self.extra, self.key = sieve, dict(extra or {}), key
        self._reader = FileSystemReader(saved) if isinstance(saved, str | Path) else saved
        assert isinstance(sieve.world, ProcessGroupWorld)
        self._world = sieve.world
        if isinstance(sieve, Sieve):
            self._part, self._labels = sieve.hook.part or WORKERS, sieve.reducer.labels
        else:
            self._labels = sieve.replica.labels
            self._part = part_of(self._labels, sieve.world.group) or WORKERS

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of what is written; or, if there is a checkpoint to load, empty tensors of its sizes."""
        return {self._part: self._room() if self._reader is not None else self._own()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the sieve from what was read."""
        found = state_dict[self._part]
        rank, size = self._world.rank, self._world.size
        rows: Mapping[str, Tensor] = found["rows"]
        before = next(iter(rows.values())).shape[0]
        text = json.loads(found["plain"][f"rank-{rank % before}"])
        self._compare(text)
        resized = before != size
        tensors = {name: self._mine(values, before, text["n"]) for name, values in rows.items()}
        tensors |= {name: torch.empty(0, dtype=getattr(torch, kind)) for name, kind in text["empty"].items()}
        state = decoded(text["state"], tensors)
        self.extra = state.pop("own")
        state |= {"rank": rank, "world_size": size}
        if resized and "pending" in state:
            state["pending"] = {}
        self.sieve._load(state, resized=resized)

    def _own(self) -> dict[str, Any]:
        tensors: dict[str, Tensor] = {}
        state = self.sieve.state_dict()
        plain = encoded({**state, "own": self.extra}, tensors)
        text = {
            **{name: state[name] for name in _COMPARED},
            "labels": dict(self._labels),
            "empty": {name: _kind(tensor) for name, tensor in tensors.items() if not tensor.numel()},
            "state": plain,
        }
        rows = {
            name: DTensor.from_local(tensor[None].contiguous(), self._mesh(tensor.device), [Shard(0)])
            for name, tensor in tensors.items()
            if tensor.numel()
        }
        return {"rows": rows, "plain": {f"rank-{self._world.rank}": json.dumps(text)}}

    def _room(self) -> dict[str, Any]:
        """Tensors to read into: of vectors as long as the model only this rank's rows, of others all."""
        known: Mapping[str, Any] = self._reader.read_metadata().state_dict_metadata
        inside = re.compile(rf"(?:(.*)\.)?{re.escape(self._part)}\.rows\.(.+)")
        matches = [(match, known[name]) for name in known if (match := inside.fullmatch(name))]
        keys = {match[1] for match, _ in matches}
        if self.key is not None:
            matches = [(match, stored) for match, stored in matches if match[1] == self.key]
        elif len(keys) > 1:
            raise BadInput(
                f"key must name one of the checkpoint's sieves, {', '.join(sorted(map(str, keys)))}, got None"
            )
        if not matches:
            raise CheckpointError(f"the checkpoint must hold {self._part} of a sieve, got none")
        before = matches[0][1].size[0]
        room = {match[2]: self._empty(stored.size, stored.properties.dtype) for match, stored in matches}
        return {"rows": room, "plain": {f"rank-{self._world.rank % before}": ""}}

    def _empty(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        world, device = self._world, self._device
        if len(size) != 2 or size[1] != self._n:
            return torch.empty(size, dtype=dtype, device=device)
        each = -(-size[0] // world.size)
        first = min(world.rank * each, size[0])
        mine = torch.empty(min(each, size[0] - first), size[1], dtype=dtype, device=device)
        return DTensor.from_local(
            mine, self._mesh(device), [Shard(0)], shape=size, stride=(size[1], 1), run_check=False
        )

    def _mine(self, rows: Tensor, before: int, n: int) -> Tensor:
        world = self._world
        if not isinstance(rows, DTensor):
            return rows[world.rank % before]
        own: Tensor = rows.to_local()
        if before == world.size:
            return own[0]
        total = world.run([all_reduce("checkpoint", own.sum(0, dtype=torch.float64))])[0]
        return (total / before).to(rows.dtype)

    def _compare(self, text: Mapping[str, Any]) -> None:
        own = self.sieve.state_dict()
        for name in _COMPARED:
            if text[name] != json.loads(json.dumps(own[name])):
                raise CheckpointError(f"the checkpoint must have this run's {name}, {own[name]}, got {text[name]}")
        for name in dict.fromkeys([*self._labels, *text["labels"]]):
            ours, theirs = self._labels.get(name, "none"), text["labels"].get(name, "none")
            if ours != theirs:
                raise CheckpointError(f"the checkpoint must be of this model: {name} is {ours}, got {theirs}")

    @property
    def _n(self) -> int:
        return len(self._vector)

    @property
    def _device(self) -> torch.device:
        return self._vector.device

    @property
    def _vector(self) -> Tensor:
        return self.sieve.reducer.residual if isinstance(self.sieve, Sieve) else self.sieve.replica.weights.shared

    def _mesh(self, device: torch.device) -> DeviceMesh:
        group = self._world.group or torch.distributed.group.WORLD
        assert group is not None
        return DeviceMesh.from_group(group, device.type)


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
