"""Checkpoints: one folder for all ranks, without pickle, atomic.

    folder/latest.json                      the current checkpoint: replaced last, atomically
    folder/step-12-1a2b3c/manifest.json     settings, parameters, its own checksum and that of every other file
    folder/step-12-1a2b3c/rank-0.*          the part of rank 0: see `parts.py`
    folder/step-12-1a2b3c/extra.*           what rank 0 saves for all ranks, if anything, such as the model

All ranks write and read together, and an error on one is raised on all. All ranks must see the folder. If there is
no such folder, `shared=False` gives every rank its own checkpoint in folder/rank-N, with its own `extra`; parts
that were saved together are loaded together.
"""

import json
import os
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradsieve.comm.collectives import Program, all_gather
from gradsieve.state.parts import (
    CheckpointError,
    Facts,
    attempt,
    checksum,
    lock,
    opened,
    read_json,
    read_part,
    sync,
    tensor_name,
    write_json,
    write_part,
)

__all__ = ["CheckpointError", "load", "save"]

FORMAT, VERSION = "gradsieve checkpoint", 5  # 5: the manifest has a checksum
_IDENTITY = ("sparsifier", "options", "n")
_FIELDS = {
    "world_size": int,
    "step": int,
    "sparsifier": str,
    "options": dict,
    "n": int,
    "labels": dict,
    "files": dict,
}
_NAME = re.compile(r"step-(\d+)-[0-9a-f]+")
_UNTIL_VISIBLE_S = 3.0  # network file systems may show a file late


def save(
    folder: Path,
    state: Mapping[str, Any],
    labels: Mapping[str, str],
    extra: Mapping[str, Any] | None = None,
    *,
    shared: bool = True,
) -> Program[None]:
    """Write one rank's part; the checkpoint appears when all ranks have written theirs.

    Rank 0 writes `extra`, with `shared=False` every rank its own.
    """
    with ExitStack() as held:
        yield from _save(folder, state, labels, extra, shared, held)


def _save(
    folder: Path,
    state: Mapping[str, Any],
    labels: Mapping[str, str],
    extra: Mapping[str, Any] | None,
    shared: bool,
    held: ExitStack,
) -> Program[None]:
    rank, step = state["rank"], state["step"]
    names = yield from _tell(f"step-{step}-{secrets.token_hex(3)}")
    name, home, commits = names[0], _home(folder, rank, shared), rank == 0 or not shared
    partial = home / f".{name}.partial"

    def write() -> Facts:
        partial.mkdir(parents=True, exist_ok=True)
        if commits:
            held.callback(os.close, lock(home))
        files = write_part(partial, f"rank-{rank}", state)
        return files if extra is None or not commits else files | write_part(partial, "extra", extra)

    files, error = attempt(write)
    parts = [json.loads(text) for text in (yield from _tell(json.dumps([error, files])))]
    error, before = _first([part[0] for part in parts]), ""
    if commits and not error:
        own = parts if shared else [parts[rank]]
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "name": name,
            **{key: state[key] for key in ("world_size", "step", *_IDENTITY)},
            "rank": None if shared else rank,
            "labels": dict(labels),
            "files": {file: facts for _, written in own for file, facts in written.items()},
        }
        before = attempt(lambda: _latest(home))[0] or ""
        _, problem = attempt(lambda: _commit(home, name, manifest))
        error = f"rank {rank}: {problem}" if problem else ""
    errors = yield from _tell(error)
    if any(errors):
        shutil.rmtree(partial, ignore_errors=True)
        if commits:
            attempt(lambda: _undo(home, name, before))
        words = next(text for text in errors if text)
        raise CheckpointError(f"checkpoint in {folder} could not be written, the previous one is kept: {words}")
    if commits:
        _remove_others(home, name)
    _forget(_home(folder, rank, not shared))


def load(folder: Path, own: Mapping[str, Any], labels: Mapping[str, str]) -> Program[dict[str, Any]]:
    """This rank's state from the last checkpoint, with `extra`; `resized` says if the number of ranks changed.

    From n ranks to m: `sum(residuals')/m == sum(residuals)/n`, and the same for every other vector of that length,
    such as weights.
    """
    seen, error = attempt(lambda: _survey(folder, own["rank"]))
    found = [json.loads(text) for text in (yield from _tell(json.dumps([error, seen])))]
    _raise_first([each[0] for each in found])
    name, shared = _elected(folder, [each[1] for each in found])
    state, error = attempt(lambda: _read(_home(folder, own["rank"], shared) / name, own, labels, shared))
    _raise_first((yield from _tell(error)))
    assert state is not None
    return state


def _tell(text: str) -> Program[list[str]]:
    """Gather a message of every rank, in rank order; also a barrier."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8)
    replies = yield from all_gather("checkpoint", own)
    return [bytes(reply.tolist()).decode() for reply in replies]


def _first(errors: list[str]) -> str:
    return next((f"rank {rank}: {text}" for rank, text in enumerate(errors) if text), "")


def _raise_first(errors: list[str]) -> None:
    for rank, text in enumerate(errors):
        if text:
            raise CheckpointError(f"{text} (found by rank {rank})")


def _home(folder: Path, rank: int, shared: bool) -> Path:
    return folder if shared else folder / f"rank-{rank}"


def _commit(home: Path, name: str, manifest: dict[str, Any]) -> None:
    partial = home / f".{name}.partial"
    _check_visible(partial, manifest)
    write_json(partial / "manifest.json", {**manifest, "checksum": checksum(manifest)})
    partial.rename(home / name)
    sync(home)
    write_json(home / "latest.json", {"format": FORMAT, "checkpoint": name})


def _check_visible(partial: Path, manifest: Mapping[str, Any]) -> None:
    """All ranks' files are in this rank's folder."""
    deadline = time.monotonic() + _UNTIL_VISIBLE_S
    for file, (size, _) in manifest["files"].items():
        while not (partial / file).is_file() or (partial / file).stat().st_size != size:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{file} is not in the folder as rank 0 sees it: all ranks must write to one folder that all "
                    "of them see; where there is none, save with shared=False"
                )
            time.sleep(0.05)


def _undo(home: Path, name: str, before: str) -> None:
    """Return to the previous checkpoint, as some rank could not commit this one."""
    if (home / name).is_dir():
        if before:
            write_json(home / "latest.json", {"format": FORMAT, "checkpoint": before})
        else:
            (home / "latest.json").unlink(missing_ok=True)
        shutil.rmtree(home / name, ignore_errors=True)


def _remove_others(home: Path, name: str) -> None:
    for old in [*home.glob("step-*"), *home.glob(".step-*.partial")]:
        if old.name != name:
            shutil.rmtree(old, ignore_errors=True)


def _forget(home: Path) -> None:
    """Remove an older checkpoint with another choice of `shared`: it must not be loaded any more."""
    if (home / "latest.json").exists():
        (home / "latest.json").unlink(missing_ok=True)
        _remove_others(home, "")


def _latest(home: Path) -> str:
    """The name of the current checkpoint."""
    path = home / "latest.json"
    latest = read_json(path)
    name = latest.get("checkpoint")
    if latest.get("format") != FORMAT or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CheckpointError(f"{path} does not name a {FORMAT}, got {str(latest)[:80]}")
    return name


def _survey(folder: Path, rank: int) -> dict[str, Any]:
    """The checkpoints that this rank can read."""
    shared = not (_home(folder, rank, False) / "latest.json").exists()
    home = _home(folder, rank, shared)
    latest = _latest(home)
    whole = sorted(path.parent.name for path in home.glob("step-*/manifest.json"))
    return {"shared": shared, "latest": latest, "names": [latest, *(name for name in whole if name != latest)]}


def _elected(folder: Path, seen: list[dict[str, Any]]) -> tuple[str, bool]:
    """The checkpoint that all ranks have: after a crash between two ranks' commits, the one before."""
    if len({each["shared"] for each in seen}) > 1:
        raise CheckpointError(f"{folder} holds a shared checkpoint on some ranks and parts of one on others")
    common = set.intersection(*(set(each["names"]) for each in seen))
    if not common:
        held = "; ".join(f"rank {rank} has {each['latest']}" for rank, each in enumerate(seen))
        raise CheckpointError(f"{folder} holds no checkpoint that all ranks have: {held}")
    votes = Counter(each["latest"] for each in seen)
    return max(sorted(common), key=lambda name: votes[name]), bool(seen[0]["shared"])


def _read(place: Path, own: Mapping[str, Any], labels: Mapping[str, str], shared: bool) -> dict[str, Any]:
    manifest = _manifest(place)
    for key in _IDENTITY:
        if manifest[key] != own[key]:
            raise CheckpointError(f"{place} must have this run's {key}, {own[key]}, got {manifest[key]}")
    for key in dict.fromkeys([*labels, *manifest["labels"]]):
        ours, theirs = labels.get(key, "none"), manifest["labels"].get(key, "none")
        if ours != theirs:
            raise CheckpointError(f"{place} must be of this model: {key} is {ours}, got {theirs}")
    world_size, rank = manifest["world_size"], own["rank"]
    same = world_size == own["world_size"]
    if not shared and (not same or manifest["rank"] != rank):
        raise CheckpointError(
            f"{place} is the part of rank {manifest['rank']} of {world_size}, saved with shared=False: only that "
            f"rank can load it, got rank {rank} of {own['world_size']}"
        )
    state = read_part(place, f"rank-{rank % world_size}", manifest["files"])
    if not same:
        state = _averaged(state, "", place, manifest)
    facts = {"rank": rank, "world_size": own["world_size"], "resized": not same}
    extra = read_part(place, "extra", manifest["files"]) if "extra.json" in manifest["files"] else {}
    return {**state, **facts, "extra": extra}


def _manifest(place: Path) -> dict[str, Any]:
    """Read and verify the manifest."""
    path = place / "manifest.json"
    manifest = read_json(path)
    if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        raise CheckpointError(f"{place} must be a {FORMAT} of version {VERSION}, got {manifest.get('version')}")
    if manifest.pop("checksum", None) != checksum(manifest) or manifest.get("name") != place.name:
        raise CheckpointError(f"{path}: checksum mismatch, the file is corrupted")
    for key, kind in _FIELDS.items():
        if not isinstance(manifest.get(key), kind):
            raise CheckpointError(f"{path} must have {key}, got {manifest.get(key)!r}")
    if manifest["world_size"] < 1:
        raise CheckpointError(f"{path} must have a world_size of at least 1, got {manifest['world_size']}")
    return manifest


def _averaged(value: Any, path: str, place: Path, manifest: dict[str, Any]) -> Any:
    """A rank's state with the mean over all ranks in place of every vector of the model's length."""
    if isinstance(value, Mapping):
        return {key: _averaged(part, tensor_name(path, key), place, manifest) for key, part in value.items()}
    if isinstance(value, Tensor) and value.is_floating_point() and value.shape == (manifest["n"],):
        return _mean(place, manifest, path).to(value.dtype)
    return value


def _mean(place: Path, manifest: dict[str, Any], name: str) -> Tensor:
    """Each new rank starts with the mean of the old ranks' vectors, summed in float64, one file at a time."""
    total = torch.zeros(manifest["n"], dtype=torch.float64)
    for rank in range(manifest["world_size"]):
        with opened(place, f"rank-{rank}", manifest["files"]) as tensors:
            total += tensors.get_tensor(name)
    mean: Tensor = total / manifest["world_size"]
    return mean
