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
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsieve.comm.collectives import Program
from gradsieve.state.agreement import Beside, alone, first_error, tell
from gradsieve.state.manifest import FORMAT, IDENTITY, make_manifest, read_manifest
from gradsieve.state.parts import (
    CheckpointError,
    Facts,
    attempt,
    checksum,
    lock,
    read_json,
    read_part,
    sync,
    write_json,
    write_part,
)
from gradsieve.state.resizing import averaged

__all__ = ["CheckpointError", "Content", "load", "load_built", "save", "save_built"]

_NAME = re.compile(r"step-(\d+)-[0-9a-f]+")
_UNTIL_VISIBLE_S = 3.0  # network file systems may show a file late


@dataclass(frozen=True)
class Content:
    """What one rank writes, or, to read it, what it has. `extra` is that of all ranks; None if there is none."""

    folder: Path
    state: Mapping[str, Any]
    extra: Mapping[str, Any] | None = None


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
    return save_built(lambda: Content(folder, state, extra), labels, shared=shared)


def save_built(
    build: Callable[[], Content], labels: Mapping[str, str], *, shared: bool = True, beside: Beside = alone
) -> Program[None]:
    """As `save`; what `build` raises on one rank is raised on all.

    beside: the ranks that save other shards of the same model. No shard is committed before all are written.
    """
    with ExitStack() as held:
        yield from _save(build, labels, shared, beside, held)


def _save(
    build: Callable[[], Content], labels: Mapping[str, str], shared: bool, beside: Beside, held: ExitStack
) -> Program[None]:
    made, error = attempt(build)
    name = f"step-{made.state['step']}-{secrets.token_hex(3)}" if made else ""
    begun = [json.loads(text) for text in (yield from tell(json.dumps([error, name])))]
    text, who = first_error([each[0] for each in begun], beside)
    if made is None or text:
        raise CheckpointError(f"nothing could be saved: {who}: {text}")
    name = beside(begun[0][1])[0]
    rank, home = made.state["rank"], _home(made.folder, made.state["rank"], shared)
    partial, commits = home / f".{name}.partial", rank == 0 or not shared

    def write() -> Facts:
        partial.mkdir(parents=True, exist_ok=True)
        if commits:
            held.callback(os.close, lock(home))
        files = write_part(partial, f"rank-{rank}", made.state)
        return files if made.extra is None or not commits else files | write_part(partial, "extra", made.extra)

    files, error = attempt(write)
    parts = [json.loads(text) for text in (yield from tell(json.dumps([error, files])))]
    (text, who), before, error = first_error([part[0] for part in parts], beside), "", ""
    if not text:
        if commits:
            own = parts if shared else [parts[rank]]
            manifest = make_manifest(name, made.state, labels, shared, [written for _, written in own])
            before = attempt(lambda: _latest(home))[0] or ""
            error = attempt(lambda: _commit(home, name, manifest))[1]
        text, who = first_error((yield from tell(error)), beside)
    if text:
        shutil.rmtree(partial, ignore_errors=True)
        if commits:
            attempt(lambda: _undo(home, name, before))
        raise CheckpointError(
            f"checkpoint in {made.folder} could not be written, the previous one is kept: {who}: {text}"
        )
    if commits:
        _remove_others(home, name)
    _forget(_home(made.folder, rank, not shared))


def load(folder: Path, own: Mapping[str, Any], labels: Mapping[str, str]) -> Program[dict[str, Any]]:
    """This rank's state from the last checkpoint, with `extra`; `resized` says if the number of ranks changed.

    From n ranks to m: `sum(residuals')/m == sum(residuals)/n`, and the same for every other vector of that length,
    such as weights.
    """
    return load_built(lambda: Content(folder, own), labels)


def load_built(
    build: Callable[[], Content], labels: Mapping[str, str], *, beside: Beside = alone
) -> Program[dict[str, Any]]:
    """As `load`, with the place and the own state that `build` returns; all shards load the same checkpoint."""

    def survey() -> tuple[Content, dict[str, Any]]:
        own = build()
        return own, _survey(own.folder, own.state["rank"])

    seen, error = attempt(survey)
    found = [json.loads(text) for text in (yield from tell(json.dumps([error, seen[1] if seen else None])))]
    _raise_first([each[0] for each in found], beside)
    assert seen is not None
    folder, own = seen[0].folder, seen[0].state
    name, shared = _elected(folder, [each[1] for each in found], beside)
    state, error = attempt(lambda: _read(_home(folder, own["rank"], shared) / name, own, labels, shared))
    _raise_first((yield from tell(error)), beside)
    assert state is not None
    return state


def _raise_first(errors: list[str], beside: Beside) -> None:
    text, who = first_error(errors, beside)
    if text:
        raise CheckpointError(f"{text} (found by {who})")


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


def _elected(folder: Path, seen: list[dict[str, Any]], beside: Beside) -> tuple[str, bool]:
    """The checkpoint that all ranks of all shards have: after a crash between two commits, the one before."""
    shards = [json.loads(text) for text in beside(json.dumps(seen))]
    everyone = [each for shard in shards for each in shard]
    if len({each["shared"] for each in everyone}) > 1:
        raise CheckpointError(f"{folder} holds a shared checkpoint on some ranks and parts of one on others")
    common = set.intersection(*(set(each["names"]) for each in everyone))
    if not common and len(shards) > 1:
        newest = [" and ".join(sorted({each["latest"] for each in shard})) for shard in shards]
        held = ", ".join(f"shard {number} has {names}" for number, names in enumerate(newest))
        raise CheckpointError(f"{folder.parent} holds no checkpoint that all shards have: {held}")
    if not common:
        held = "; ".join(f"rank {rank} has {each['latest']}" for rank, each in enumerate(everyone))
        raise CheckpointError(f"{folder} holds no checkpoint that all ranks have: {held}")
    votes = Counter(each["latest"] for each in everyone)
    return max(sorted(common), key=lambda name: votes[name]), bool(everyone[0]["shared"])


def _read(place: Path, own: Mapping[str, Any], labels: Mapping[str, str], shared: bool) -> dict[str, Any]:
    manifest = read_manifest(place)
    for key in IDENTITY:
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
        state = averaged(state, "", place, manifest)
    facts = {"rank": rank, "world_size": own["world_size"], "resized": not same}
    extra = read_part(place, "extra", manifest["files"]) if "extra.json" in manifest["files"] else {}
    return {**state, **facts, "extra": extra}
