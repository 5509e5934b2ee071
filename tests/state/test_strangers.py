"""Checkpoints whose files a stranger has made: links lead nowhere, and wrong values are refused in one sentence."""

from pathlib import Path
from typing import Any

import pytest
from test_parts import _forged, loaded, saved, state

from gradsieve import CheckpointError, VirtualWorld
from gradsieve.state import checkpoint


def _moved(path: Path, outside: Path) -> None:
    """A link in place of a file or folder, to where it is now."""
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


@pytest.mark.parametrize("name", ["", "manifest.json", "rank-1.json", "../latest.json"])
def test_links_are_not_followed(tmp_path: Path, name: str) -> None:
    place = saved(tmp_path / "checkpoint")
    (tmp_path / "outside").mkdir()
    _moved((place / name).resolve(), tmp_path / "outside")
    with pytest.raises(CheckpointError, match=r"is a link: the files of a checkpoint|json is missing"):
        loaded(tmp_path / "checkpoint")


def test_a_link_inside_the_folder_is_none_of_its_files(tmp_path: Path) -> None:
    place = saved(tmp_path)
    (place / "rank-0.json").rename(place / "other.json")
    (place / "rank-0.json").symlink_to("other.json")
    with pytest.raises(CheckpointError, match="is a link"):
        loaded(tmp_path)


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    saved(tmp_path / "disk")
    (tmp_path / "checkpoint").symlink_to("disk")
    assert [each["step"] for each in loaded(tmp_path / "checkpoint")] == [7, 7]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """A file beside the pointer to the checkpoint, whose name a stranger can know."""
    folder = tmp_path / "checkpoint"
    saved(folder)
    (tmp_path / "other").write_text("kept")
    (folder / ".latest.json.partial").symlink_to(tmp_path / "other")
    saved(folder, step=9)
    assert (tmp_path / "other").read_text() == "kept"
    assert [each["step"] for each in loaded(folder)] == [9, 9]


@pytest.mark.parametrize("facts", [5, [1], [1.5, 2], ["1", 2], [True, 2], {"size": 1}, None])
def test_a_forged_list_of_files(tmp_path: Path, facts: Any) -> None:
    _forged(saved(tmp_path), files={"rank-0.json": facts})
    with pytest.raises(CheckpointError, match=r"manifest.json must have the size and checksum of every file"):
        loaded(tmp_path)


def test_extra_must_be_a_dict(tmp_path: Path) -> None:
    """It is refused when it is saved, not when it is loaded, and the checkpoint before is kept."""
    saved(tmp_path)
    extra: Any = [1]
    programs = [checkpoint.save(tmp_path, state(rank, 2, 8), {"x": "y"}, extra) for rank in range(2)]
    with pytest.raises(CheckpointError, match="previous one is kept: rank 0: extra must be a dict, got list"):
        VirtualWorld(2).run(programs)
    assert [each["step"] for each in loaded(tmp_path)] == [7, 7]
