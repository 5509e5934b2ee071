"""Checkpoints: one folder for all ranks, without pickle, whole or not there at all.

    folder/latest.json                      which checkpoint counts: replaced last, in one go
    folder/step-12-1a2b3c/manifest.json     settings, parameters, and size and checksum of every other file
    folder/step-12-1a2b3c/rank-0.json       numbers and lists of rank 0
    folder/step-12-1a2b3c/rank-0.safetensors    its tensors, the residual among them
    folder/step-12-1a2b3c/extra.*           what rank 0 wants kept for all, if anything: the model

All ranks write and read together, through a folder that all of them see; an error on one is raised on all.
"""

import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gradsieve._check import BadInput
from gradsieve.comm.collectives import Program, all_gather

FORMAT, VERSION = "gradsieve checkpoint", 4  # 4: states by name
_CHUNK = 1 << 22


class CheckpointError(BadInput):
    """A checkpoint is missing, damaged, or of something else."""


def save(
    folder: Path, state: Mapping[str, Any], labels: Mapping[str, str], extra: Mapping[str, Any] | None = None
) -> Program[None]:
    """Write one rank's part; the checkpoint appears when all ranks have written theirs. Rank 0 writes `extra`."""
    rank, world_size, step = state["rank"], state["world_size"], state["step"]
    names = yield from _tell(f"step-{step}-{secrets.token_hex(3)}", world_size)
    name = names[0]
    partial, error, files = folder / f".{name}.partial", "", {}
    try:
        partial.mkdir(parents=True, exist_ok=True)
        files = _write_part(partial, f"rank-{rank}", state)
        if rank == 0 and extra is not None:
            files |= _write_part(partial, "extra", extra)
    except OSError as problem:
        error = str(problem)
    found = yield from _tell(json.dumps([error, files]), world_size)
    parts = [json.loads(text) for text in found]
    error = next((f"rank {r}: {part[0]}" for r, part in enumerate(parts) if part[0]), "")
    if rank == 0 and not error:
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            **{key: state[key] for key in ("world_size", "step", "sparsifier", "options", "n")},
            "labels": dict(labels),
            "files": {file: facts for _, written in parts for file, facts in written.items()},
        }
        try:
            _commit(folder, name, partial, manifest)
        except OSError as problem:
            error = f"rank 0: {problem}"
    errors = yield from _tell(error, world_size)
    if rank == 0 and any(errors):
        shutil.rmtree(partial, ignore_errors=True)
    if any(errors):
        raise CheckpointError(
            f"checkpoint in {folder} could not be written, the previous one stands: {max(errors)}"
        )


def load(folder: Path, own: Mapping[str, Any], labels: Mapping[str, str]) -> Program[dict[str, Any]]:
    """This rank's state from the last checkpoint, with `extra`; `resized` says if the number of ranks changed.

    From n ranks to m: `sum(residuals')/m == sum(residuals)/n`, and so for every other vector of that length, such
    as weights.
    """
    error, state = "", {}
    try:
        state = _read(folder, own, labels)
    except CheckpointError as problem:
        error = str(problem)
    errors = yield from _tell(error, own["world_size"])
    for rank, text in enumerate(errors):
        if text:
            raise CheckpointError(f"{text} (found by rank {rank})")
    return state


def _tell(text: str, world_size: int) -> Program[list[str]]:
    """What every rank has to say, in rank order; also a barrier."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8)
    replies = yield from all_gather("checkpoint", own)
    assert len(replies) == world_size
    return [bytes(reply.tolist()).decode() for reply in replies]


def _write_part(partial: Path, name: str, state: Mapping[str, Any]) -> dict[str, list[int]]:
    """Two files; returns their sizes and checksums."""
    tensors: dict[str, Tensor] = {}
    plain = without_tensors(state, "", tensors)
    data, text = partial / f"{name}.safetensors", partial / f"{name}.json"
    save_file(tensors, data)
    text.write_text(json.dumps(plain))
    for path in (data, text):
        _sync(path)
    return {path.name: _facts(path) for path in (data, text)}


def _commit(folder: Path, name: str, partial: Path, manifest: dict[str, Any]) -> None:
    _write_json(partial / "manifest.json", manifest)
    partial.rename(folder / name)
    _sync(folder)
    _write_json(folder / "latest.json", {"format": FORMAT, "checkpoint": name})
    for old in [*folder.glob("step-*"), *folder.glob(".step-*.partial")]:
        if old.name != name:
            shutil.rmtree(old, ignore_errors=True)


def _read(folder: Path, own: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    latest = _read_json(folder / "latest.json")
    name = latest.get("checkpoint")
    if latest.get("format") != FORMAT or not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"{folder / 'latest.json'} must name a {FORMAT}, got {str(latest)[:80]}")
    place = folder / name
    manifest = _read_json(place / "manifest.json")
    if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        raise CheckpointError(f"{place} must be a {FORMAT} of version {VERSION}, got {manifest.get('version')}")
    for key in ("sparsifier", "options", "n"):
        if manifest[key] != own[key]:
            raise CheckpointError(f"{place} must have this run's {key}, {own[key]}, got {manifest[key]}")
    for key in dict.fromkeys([*labels, *manifest["labels"]]):
        ours, theirs = labels.get(key, "none"), manifest["labels"].get(key, "none")
        if ours != theirs:
            raise CheckpointError(f"{place} must be of this model: {key} is {ours}, got {theirs}")
    world_size = manifest["world_size"]
    same = world_size == own["world_size"]
    state = _read_part(place, f"rank-{own['rank'] % world_size}", manifest)
    if not same:
        state = _averaged(state, "", place, manifest)
    facts = {"rank": own["rank"], "world_size": own["world_size"], "resized": not same}
    extra = _read_part(place, "extra", manifest) if "extra.json" in manifest["files"] else {}
    return {**state, **facts, "extra": extra}


def _averaged(value: Any, name: str, place: Path, manifest: dict[str, Any]) -> Any:
    """A rank's state with the mean over all ranks in place of every vector of the model's length."""
    if isinstance(value, Mapping):
        return {key: _averaged(part, f"{name}.{key}".strip("."), place, manifest) for key, part in value.items()}
    if isinstance(value, Tensor) and value.is_floating_point() and value.shape == (manifest["n"],):
        return _mean(place, manifest, name).to(value.dtype)
    return value


def _read_part(place: Path, name: str, manifest: dict[str, Any]) -> dict[str, Any]:
    text = _verified(place, f"{name}.json", manifest)
    with _opened(place, name, manifest) as tensors:
        names: list[str] = list(tensors.keys())
        state = with_tensors(_read_json(text), {name: tensors.get_tensor(name) for name in names})
    assert isinstance(state, dict)
    return state


def _mean(place: Path, manifest: dict[str, Any], name: str) -> Tensor:
    """Each new rank starts with the mean of the old ranks' vectors, summed in float64, one file at a time."""
    total = torch.zeros(manifest["n"], dtype=torch.float64)
    for rank in range(manifest["world_size"]):
        with _opened(place, f"rank-{rank}", manifest) as tensors:
            total += tensors.get_tensor(name)
    mean: Tensor = total / manifest["world_size"]
    return mean


@contextmanager
def _opened(place: Path, name: str, manifest: dict[str, Any]) -> Iterator[Any]:
    path = _verified(place, f"{name}.safetensors", manifest)
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except SafetensorError as problem:
        raise CheckpointError(f"{path} must be a safetensors file, got {problem}") from problem


def _verified(place: Path, name: str, manifest: dict[str, Any]) -> Path:
    path = place / name
    if not path.is_file():
        raise CheckpointError(f"{path} must exist, got no such file")
    if _facts(path) != manifest["files"].get(name):
        raise CheckpointError(f"{path} must be as it was written, got other content: it is damaged")
    return path


def _facts(path: Path) -> list[int]:
    """Size and CRC-32."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return [path.stat().st_size, crc]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except OSError as problem:
        raise CheckpointError(f"{path} must be readable, got {problem.strerror}") from problem
    except ValueError as problem:
        raise CheckpointError(f"{path} must be JSON, got {problem}") from problem
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {str(value)[:40]}")
    return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value, indent=1))
    _sync(partial)
    partial.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Make sure that what was written survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def without_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """`value` with names in place of its tensors, which are put aside."""
    if isinstance(value, Tensor):
        # Weights that are tied come as two tensors in one place, which safetensors does not write.
        places = {tensor.data_ptr() for tensor in tensors.values()}
        tensors[name] = value.clone() if value.data_ptr() in places else value.contiguous()
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {key: without_tensors(part, f"{name}.{key}".strip("."), tensors) for key, part in value.items()}
    return value


def with_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"tensor"}:
            return tensors[value["tensor"]]
        return {key: with_tensors(part, tensors) for key, part in value.items()}
    return value
