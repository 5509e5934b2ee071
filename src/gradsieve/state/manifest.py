"""The manifest of a checkpoint: settings, parameters, its own checksum and that of every other file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradsieve.state.parts import CheckpointError, Facts, are_facts, checksum, read_json, refuse_link

FORMAT, VERSION = "gradsieve checkpoint", 5  # 5: the manifest has a checksum
IDENTITY = ("sparsifier", "options", "n")
_FIELDS = {
    "world_size": int,
    "step": int,
    "sparsifier": str,
    "options": dict,
    "n": int,
    "labels": dict,
    "files": dict,
}


def make_manifest(
    name: str, state: Mapping[str, Any], labels: Mapping[str, str], shared: bool, parts: list[Facts]
) -> dict[str, Any]:
    """The manifest of a checkpoint with these files; its checksum comes last."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        **{key: state[key] for key in ("world_size", "step", *IDENTITY)},
        "rank": None if shared else state["rank"],
        "labels": dict(labels),
        "files": {file: facts for written in parts for file, facts in written.items()},
    }


def read_manifest(place: Path) -> dict[str, Any]:
    """Read and verify the manifest."""
    refuse_link(place)
    path = place / "manifest.json"
    manifest = read_json(path)
    if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        raise CheckpointError(f"{place} must be a {FORMAT} of version {VERSION}, got {manifest.get('version')}")
    if manifest.pop("checksum", None) != checksum(manifest) or manifest.get("name") != place.name:
        raise CheckpointError(f"{path}: checksum mismatch, the file is corrupted")
    for key, kind in _FIELDS.items():
        if not isinstance(manifest.get(key), kind):
            raise CheckpointError(f"{path} must have {key}, got {manifest.get(key)!r}")
    if not are_facts(manifest["files"]):
        got = str(manifest["files"])[:80]
        raise CheckpointError(f"{path} must have the size and checksum of every file, got {got}")
    if manifest["world_size"] < 1:
        raise CheckpointError(f"{path} must have a world_size of at least 1, got {manifest['world_size']}")
    return manifest
