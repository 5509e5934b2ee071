"""Trials of disks and files: full, read-only, cut, damaged, swapped, shared by two runs."""

import os
import random
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gradsieve import CheckpointError, VirtualWorld
from gradsieve.state import checkpoint
from studies.faults.results import Result

_N, _RANKS = 20_000, 3  # 80 kB per rank


def save(folder: Path, step: int, **options: Any) -> None:
    states = [_state(rank, step) for rank in range(_RANKS)]
    programs = [checkpoint.save(folder, state, {}, {"step": step}, **options) for state in states]
    VirtualWorld(_RANKS).run(programs)


def load(folder: Path) -> int:
    """The step of the checkpoint in the folder; its content is checked."""
    owns = [_state(rank, 0) for rank in range(_RANKS)]
    found = VirtualWorld(_RANKS).run([checkpoint.load(folder, own, {}) for own in owns])
    steps = {state["step"] for state in found} | {state["extra"]["step"] for state in found}
    if len(steps) > 1 or any(
        not torch.equal(s["residual"], _state(s["rank"], s["step"])["residual"]) for s in found
    ):
        raise AssertionError(f"parts of different checkpoints: {steps}")
    return int(steps.pop())


def _state(rank: int, step: int) -> dict[str, Any]:
    facts = {"sparsifier": "topk", "options": {}, "n": _N, "rank": rank, "world_size": _RANKS, "step": step}
    return {**facts, "residual": torch.full((_N,), float(10 * step + rank))}


@contextmanager
def small_disk(place: Path, kilobytes: int) -> Iterator[None]:
    """A tmpfs, which needs root."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def full_disk(chance: random.Random, folder: Path) -> Result:
    """The disk is full at a random moment of a save; the previous checkpoint is kept."""
    place = folder / "disk"
    with small_disk(place, 800):
        save(place / "run", 1)
        (place / "ballast").write_bytes(b"x" * 1024 * chance.randrange(200, 510))
        try:
            save(place / "run", 2)
            wanted = 2
        except CheckpointError:
            wanted = 1
        found, left = load(place / "run"), list(place.rglob(".step*"))
    return Result("disk full", found == wanted and not left, f"step {found} loaded, step {wanted} expected")


def read_only(chance: random.Random, folder: Path) -> Result:
    """The folder becomes read-only."""
    place = folder / "disk"
    with small_disk(place, 4000):
        save(place / "run", 1)
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        try:
            save(place / "run", 2)
            refused = False
        except CheckpointError:
            refused = True
        found = load(place / "run")
    return Result("read-only folder", refused and found == 1, f"step {found} loaded")


def damaged(chance: random.Random, folder: Path) -> Result:
    """A file of the checkpoint is cut, has a bit flipped, or is swapped with another rank's."""
    save(folder / "run", 1)
    files = sorted(path for path in (folder / "run").rglob("*") if path.is_file())
    path, how = chance.choice(files), chance.choice(["cut", "bit"])
    data = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(data[: chance.randrange(len(data))])
    elif how == "bit":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
    return _read_back("damaged files", folder, f"{how} {path.name}", whole=how == "bit")  # white space may change


def swapped(chance: random.Random, folder: Path) -> Result:
    """Two files change places: two ranks' parts, of one checkpoint or of two."""
    save(folder / "run", 1)
    save(folder / "other", chance.choice([1, 2]))
    ours = sorted((folder / "run").rglob("rank-*"))
    one, other = chance.choice(ours), chance.choice([*ours, *sorted((folder / "other").rglob("rank-*"))])
    kept = one.read_bytes()
    same = kept == other.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    return _read_back("swapped ranks", folder, f"{one.name} and {other.name}", whole=same)


def _read_back(kind: str, folder: Path, what: str, *, whole: bool) -> Result:
    """Check that the checkpoint is refused with a message, or, with `whole`, loads what was saved."""
    try:
        found, ok = f"step {load(folder / 'run')} loaded whole", whole
    except CheckpointError as problem:
        found, ok = "refused" if str(problem) else "", True
    except Exception as problem:
        found, ok = f"{type(problem).__name__}: {problem}", False
    return Result(kind, ok, f"{what}: {found}")


def two_runs(chance: random.Random, folder: Path) -> Result:
    """Two runs save into one folder at the same time: afterwards a complete checkpoint of one of them is loaded."""
    problems: list[str] = []

    def many(first: int) -> None:
        for step in range(first, first + 6):
            try:
                save(folder / "run", step)
            except CheckpointError as problem:
                problems.append(str(problem))

    threads = [threading.Thread(target=many, args=(first,)) for first in (100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        found = f"step {load(folder / 'run')}"
        return Result("two runs in one folder", True, f"{found} loaded, {len(problems)} saves refused")
    except CheckpointError as problem:
        return Result("two runs in one folder", False, str(problem))


def root() -> bool:
    return os.geteuid() == 0
