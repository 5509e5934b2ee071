"""One part of a checkpoint: a value made of dicts, lists, numbers, strings and tensors, in two files.

    name.json           everything except the tensors, which are replaced by their names
    name.safetensors    the tensors, named by their place in the value

Files are not trusted: nothing is executed, sizes and checksums are verified before anything is read, and no path
leaves its folder.
"""

import fcntl
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gradsieve._check import BadInput

Facts = dict[str, list[int]]  # size and CRC-32 of every file, by name
T = TypeVar("T")

_CHUNK = 1 << 22
_LARGEST_JSON = 1 << 28  # bytes: no checkpoint has a larger file
_TENSOR, _DICT = "tensor", "dict"  # keys that stand for a tensor, and for a dict that would look like one of them
_PLAIN = (str, bool, int, float, type(None))


class CheckpointError(BadInput):
    """A checkpoint is missing, corrupted, or belongs to something else."""


def attempt(work: Callable[[], T]) -> tuple[T | None, str]:
    """The result of `work`, or its error, whatever it is, to report it to the other ranks."""
    try:
        return work(), ""
    except (BadInput, OSError) as problem:
        return None, str(problem)
    except Exception as problem:
        return None, f"{type(problem).__name__}: {problem}"


def write_part(folder: Path, name: str, value: Mapping[str, Any]) -> Facts:
    """Two files; returns their sizes and checksums."""
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{name} must be a dict, got {type(value).__name__}")
    tensors: dict[str, Tensor] = {}
    plain = encoded(value, tensors)
    data, text = folder / f"{name}.safetensors", folder / f"{name}.json"
    save_file(tensors, data)
    text.write_text(json.dumps(plain), encoding="utf-8")
    for path in (data, text):
        sync(path)
    return {path.name: facts_of(path) for path in (data, text)}


def read_part(folder: Path, name: str, files: Facts) -> dict[str, Any]:
    """The value that `write_part` wrote; tuples come back as lists, keys that were numbers as strings."""
    text = verified(folder, f"{name}.json", files)
    with opened(folder, name, files) as tensors:
        names: list[str] = list(tensors.keys())
        value = decoded(read_json(text), {name: tensors.get_tensor(name) for name in names})
    if not isinstance(value, dict):
        raise CheckpointError(f"{text} must hold a dict, got {type(value).__name__}")
    return value


@contextmanager
def opened(folder: Path, name: str, files: Facts) -> Iterator[Any]:
    """The tensors of a part, one at a time."""
    path = verified(folder, f"{name}.safetensors", files)
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except SafetensorError as problem:
        raise CheckpointError(f"{path} is not a safetensors file: {problem}") from problem


def tensor_name(path: str, key: Any) -> str:
    """The name of what lies at `key` in the value at `path`: no two places have the same."""
    return f"{path}/{quote(str(key), safe='')}"


def verified(folder: Path, name: str, files: Facts) -> Path:
    """The path of a file, if it exists and its size and checksum are right."""
    path = folder / name
    refuse_link(path)
    if name not in files or not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete")
    if path.stat().st_size != files[name][0] or facts_of(path) != files[name]:
        raise CheckpointError(f"{path}: checksum mismatch, the file is corrupted")
    return path


def refuse_link(path: Path) -> None:
    """Raise an error for a symbolic link: it could lead out of the checkpoint's folder."""
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link: the files of a checkpoint must be in its folder")


def lock(folder: Path) -> int:
    """Keep others from saving to a folder until the descriptor that is returned is closed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CheckpointError(
            f"another process is saving to {folder}: wait until it ends, or give each run a folder of its own"
        ) from None
    except OSError:  # a file system without locks
        pass
    return descriptor


def are_facts(files: Any) -> bool:
    """Whether a value read from a manifest has the type of `Facts`."""
    return isinstance(files, dict) and all(
        isinstance(each, list) and len(each) == 2 and all(type(number) is int for number in each)
        for each in files.values()
    )


def facts_of(path: Path) -> list[int]:
    """Size and CRC-32."""
    crc, size = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return [size, crc]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    refuse_link(path)
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} could not be read: no such file")
        if path.stat().st_size > _LARGEST_JSON:
            raise CheckpointError(f"{path} could not be read: {path.stat().st_size:,} bytes is too large")
        value = json.loads(path.read_text(encoding="utf-8"))
    except CheckpointError:
        raise
    except OSError as problem:
        raise CheckpointError(f"{path} could not be read: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path} is not JSON: {problem}") from problem
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {str(value)[:40]}")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a file atomically."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # it may be a stranger's link to another file
    with partial.open("x", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=1))
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def checksum(value: Mapping[str, Any]) -> int:
    """CRC-32 of a JSON object, independent of its formatting."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def sync(path: Path) -> None:
    """Flush to the disk, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def encoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    """`value` in the types of JSON; its tensors are moved to a dict, by name."""
    return _encoded(value, "", tensors, set())


def _encoded(value: Any, path: str, tensors: dict[str, Tensor], storages: set[int]) -> Any:
    if isinstance(value, Tensor):
        # Tied weights share their memory, which safetensors does not write.
        value = value.detach()
        place = value.untyped_storage().data_ptr()
        tensors[path] = value.clone() if place in storages else value.contiguous()
        storages.add(place)
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for key, part in value.items():
            if not isinstance(key, str | int) or str(key) in found:
                raise CheckpointError(f"keys must be strings or numbers that differ as text, got {key!r}")
            found[str(key)] = _encoded(part, tensor_name(path, key), tensors, storages)
        return {_DICT: found} if found.keys() in ({_TENSOR}, {_DICT}) else found
    if isinstance(value, list | tuple):
        return [_encoded(part, tensor_name(path, i), tensors, storages) for i, part in enumerate(value)]
    if not isinstance(value, _PLAIN):
        raise CheckpointError(
            f"a checkpoint holds dicts, lists, numbers, strings and tensors, got {type(value).__name__} at "
            f"{path.strip('/') or 'the top'}"
        )
    return value


def decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that was encoded."""
    if isinstance(value, list):
        return [decoded(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TENSOR}:
        name = value[_TENSOR]
        if name not in tensors:
            raise CheckpointError(f"tensor {name} is missing: the checkpoint is incomplete")
        return tensors[name]
    inner = value[_DICT] if value.keys() == {_DICT} else value
    if not isinstance(inner, dict):
        raise CheckpointError(f"a checkpoint must hold a dict there, got {type(inner).__name__}")
    return {key: decoded(part, tensors) for key, part in inner.items()}
