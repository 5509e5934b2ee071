"""What is written comes back, whatever its keys are called; what was changed on disk never does."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradsieve import CheckpointError, VirtualWorld
from gradsieve.state import checkpoint
from gradsieve.state.parts import lock, read_part, write_part

KEYS = st.one_of(
    st.sampled_from(["tensor", "dict", "__metadata__", "a", "b", "a.b", "a/b", "a%2Fb", "", "."]),
    st.text(max_size=4),
    st.integers(-3, 3).map(str),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.lists(st.integers(-5, 5), max_size=3).map(lambda x: torch.tensor(x, dtype=torch.int64)),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=8,
)


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and one == other


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=st.dictionaries(KEYS, VALUES, max_size=4))
def test_every_value_comes_back(value: dict[str, Any], tmp_path: Path) -> None:
    assert alike(read_part(tmp_path, "x", write_part(tmp_path, "x", value)), value)


def test_values_that_once_did_not_come_back(tmp_path: Path) -> None:
    x, y = torch.arange(3), torch.arange(4.0)
    tied = torch.zeros(6)
    value = {
        "x": {"tensor": x},
        "__metadata__": y,
        "a": {"b": x},
        "a.b": y,
        "list": [x, {"tensor": y}],
        "tied": [tied, tied, tied[2:]],
        "grad": torch.nn.Parameter(y),
    }
    found = read_part(tmp_path, "extra", write_part(tmp_path, "extra", value))
    assert alike(found, value | {"grad": y})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": {1, 2}}, "holds dicts, lists, numbers, strings and tensors, got set at a"),
        ({"a": [object()]}, "got object at a/0"),
        ({1: 0, "1": 0}, "keys must be strings or numbers that differ as text, got '1'"),
        ({(1, 2): 0}, "keys must be strings or numbers"),
    ],
)
def test_values_that_cannot_come_back_are_refused(value: dict[Any, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        write_part(tmp_path, "extra", value)


def state(rank: int, world_size: int, step: int = 7) -> dict[str, Any]:
    identity = {"sparsifier": "topk", "options": {"a": 1}, "n": 3}
    return {**identity, "rank": rank, "world_size": world_size, "step": step, "residual": torch.arange(3.0) + rank}


def saved(folder: Path, step: int = 7, **options: Any) -> Path:
    """A checkpoint of two ranks; returns where it is."""
    states = [state(rank, 2, step) for rank in range(2)]
    VirtualWorld(2).run([checkpoint.save(folder, each, {"x": "y"}, {"m": 1}, **options) for each in states])
    return folder / json.loads((folder / "latest.json").read_text())["checkpoint"] if not options else folder


def loaded(folder: Path, world_size: int = 2) -> list[dict[str, Any]]:
    owns = [state(rank, world_size) for rank in range(world_size)]
    return VirtualWorld(world_size).run([checkpoint.load(folder, own, {"x": "y"}) for own in owns])


def test_every_bit_of_every_small_file_is_guarded(tmp_path: Path) -> None:
    """A flipped bit raises an error, or changes nothing that counts."""
    place = saved(tmp_path)
    expected = checkpoint.read_manifest(place), checkpoint._latest(tmp_path)
    refused = 0
    for path, read in (
        (place / "manifest.json", lambda: checkpoint.read_manifest(place)),
        (tmp_path / "latest.json", lambda: checkpoint._latest(tmp_path)),
    ):
        good = path.read_bytes()
        for bit in range(8 * len(good)):
            data = bytearray(good)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            try:
                found = read()
            except CheckpointError:
                refused += 1
            else:
                assert found in expected or not (tmp_path / str(found)).exists(), bit
        path.write_bytes(good)
    assert refused > 4000
    assert torch.equal(loaded(tmp_path)[1]["residual"], torch.arange(3.0) + 1)


def _swap(place: Path) -> None:
    one, other = place / "rank-0.safetensors", place / "rank-1.safetensors"
    one.rename(place / "x")
    other.rename(one)
    (place / "x").rename(other)


def _leave(place: Path) -> None:
    outside = place.parent.parent / "outside.json"
    (place / "rank-0.json").rename(outside)
    (place / "rank-0.json").symlink_to(outside)


def _escape(place: Path) -> None:
    (place.parent / "latest.json").write_text(
        json.dumps({"format": checkpoint.FORMAT, "checkpoint": "../" + place.parent.name + "/" + place.name})
    )


def _parent(place: Path) -> None:
    (place.parent / "latest.json").write_text(json.dumps({"format": checkpoint.FORMAT, "checkpoint": ".."}))


def _fifo(place: Path) -> None:
    (place / "manifest.json").unlink()
    os.mkfifo(place / "manifest.json")


def _deep(place: Path) -> None:
    (place / "manifest.json").write_text("[" * 200_000)


def _huge(place: Path) -> None:
    with (place / "rank-0.safetensors").open("ab") as file:
        file.truncate(1 << 40)  # a hole: a terabyte that takes no space


def _forged(place: Path, **changed: Any) -> None:
    """A manifest of a stranger, with a checksum that is right."""
    manifest = json.loads((place / "manifest.json").read_text()) | changed
    manifest.pop("checksum")
    (place / "manifest.json").write_text(json.dumps({**manifest, "checksum": checkpoint.checksum(manifest)}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_swap, "rank-0.safetensors: checksum mismatch"),
        (_leave, "rank-0.json is a link"),
        (_escape, "does not name a gradsieve checkpoint"),
        (_parent, "does not name a gradsieve checkpoint"),
        (_fifo, "manifest.json could not be read: no such file"),
        (_deep, "manifest.json is not JSON"),
        (_huge, "rank-0.safetensors: checksum mismatch"),
        (lambda place: _forged(place, world_size=0), "world_size of at least 1"),
        (lambda place: _forged(place, files=[]), "must have files"),
        (lambda place: _forged(place, n=10**15), "must have this run's n, 3"),
        (lambda place: _forged(place, labels={"x": "<b>"}), "must be of this model: x is y, got <b>"),
        (lambda place: _forged(place, files={}), "rank-0.json is missing"),
    ],
)
def test_files_from_strangers(damage: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    place = saved(tmp_path / "checkpoint")
    damage(place)
    with pytest.raises(CheckpointError, match=words):
        loaded(tmp_path / "checkpoint")


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    """A file that would run code if anything unpickled it."""
    place = saved(tmp_path)
    torch.save({"residual": torch.zeros(3)}, place / "rank-0.safetensors")
    facts = {f"rank-{r}.{kind}": None for r in range(2) for kind in ("json", "safetensors")}
    from gradsieve.state.parts import facts_of

    _forged(place, files={name: facts_of(place / name) for name in facts})
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        loaded(tmp_path)


def test_parts_of_ranks_that_share_no_folder(tmp_path: Path) -> None:
    saved(tmp_path, shared=False)
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0", "rank-1"}
    found = loaded(tmp_path)
    assert [each["residual"].tolist() for each in found] == [[0, 1, 2], [1, 2, 3]]
    assert [each["extra"] for each in found] == [{"m": 1}, {"m": 1}]
    with pytest.raises(CheckpointError, match=r"part of rank 0 of 2, saved with shared=False"):
        loaded(tmp_path, world_size=1)


def test_after_a_crash_between_two_commits_the_one_before_is_loaded(tmp_path: Path) -> None:
    saved(tmp_path, shared=False)
    before = json.loads((tmp_path / "rank-0" / "latest.json").read_text())["checkpoint"]
    # Rank 0 has committed the next one, rank 1 has not, and nothing was removed yet.
    home = tmp_path / "rank-0"
    os.rename(home / before, tmp_path / "kept")
    (home / "latest.json").unlink()
    solo = {**state(0, 1, 9), "world_size": 2}
    VirtualWorld(1).run([checkpoint.save(tmp_path, solo, {"x": "y"}, shared=False)])
    os.rename(tmp_path / "kept", home / before)
    assert len(list(home.glob("step-*"))) == 2
    assert [each["step"] for each in loaded(tmp_path)] == [7, 7]


def test_one_choice_of_shared_replaces_the_other(tmp_path: Path) -> None:
    saved(tmp_path, shared=False)
    saved(tmp_path, step=8)
    assert [each["step"] for each in loaded(tmp_path)] == [8, 8]
    saved(tmp_path, step=9, shared=False)
    assert [each["step"] for each in loaded(tmp_path)] == [9, 9]
    assert not list(tmp_path.glob("step-*"))


def test_only_one_run_at_a_time_saves_to_a_folder(tmp_path: Path) -> None:
    """Otherwise one would remove what the other has just committed."""
    saved(tmp_path)
    held = lock(tmp_path)
    with pytest.raises(CheckpointError, match="another process is saving to"):
        saved(tmp_path, step=8)
    os.close(held)
    assert [each["step"] for each in loaded(tmp_path)] == [7, 7]
    saved(tmp_path, step=9)
    assert not list(tmp_path.glob(".*"))
