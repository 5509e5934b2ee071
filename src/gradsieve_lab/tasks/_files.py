"""Files of the data folder: find them, read them, and decode the images of MNIST and CIFAR-10."""

import bz2
import gzip
import io
import lzma
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from gradsieve_lab.tasks.base import DataError

Images = tuple[np.ndarray, np.ndarray]  # uint8 of shape (examples, channels, rows, columns), and classes
CLASSES = 10
CIFAR = "cifar-10-batches-py"
CIFAR_TRAIN, CIFAR_TEST = [f"{CIFAR}/data_batch_{i}" for i in range(1, 6)], f"{CIFAR}/test_batch"
MNIST = [f"mnist/{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


def find(data_dir: Path | None, dataset: str, *names: str) -> Path:
    """The first of the names that is in the data folder; they are alternatives for the same file."""
    if data_dir is None:
        raise DataError(f"dataset {dataset} needs a data folder: name it with --data-dir or GRADSIEVE_DATA")
    for name in names:
        if (data_dir / name).is_file():
            return data_dir / name
    raise DataError(f"{' or '.join(names)} must be in the data folder {data_dir}, got no such file")


def read(path: Path) -> bytes:
    """The contents, decompressed if the name ends in .gz, .xz or .bz2."""
    unpack = {".gz": gzip.decompress, ".xz": lzma.decompress, ".bz2": bz2.decompress}.get(path.suffix, bytes)
    try:
        return unpack(path.read_bytes())
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} must be a complete, readable file, got: {error}") from error


def read_text(path: Path) -> str:
    try:
        return read(path).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} must be UTF-8 text, got: {error}") from error


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an array of unsigned bytes: two zeros, the type 8, the number of dimensions, their sizes, the data."""
    content, start = read(path), 4 + 4 * dimensions
    if len(content) < start or content[:4] != bytes([0, 0, 8, dimensions]):
        raise DataError(f"{path} must be an idx file of {dimensions} dimensions, got header {content[:4].hex()!r}")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    size = int(np.prod(shape, dtype=object))
    if len(content) - start != size or not size:
        raise DataError(f"{path} must hold as much as its header {shape} says, got {len(content) - start} bytes")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_mnist(images: Path, labels: Path) -> Images:
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if len(x) != len(y):
        raise DataError(f"{labels} must hold one label for each of {len(x)} images, got {len(y)}")
    if int(y.max()) >= CLASSES:
        raise DataError(f"{labels} must hold labels below {CLASSES}, got {y.max()}")
    return x[:, None].copy(), y.astype(np.int64)


_REBUILD, _FROM_BUFFER = np.empty(0).__reduce__()[0], np.empty(0).__reduce_ex__(5)[0]
_ALLOWED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _REBUILD,
    ("numpy._core.multiarray", "_reconstruct"): _REBUILD,
    ("numpy._core.numeric", "_frombuffer"): _FROM_BUFFER,
    ("_codecs", "encode"): lambda text, _: text.encode("latin1"),
}


class _ArraysOnly(pickle.Unpickler):
    """An unpickler of arrays only: other pickles could call any function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name}, which a pickle of arrays does not need")
        return _ALLOWED[module, name]


def read_cifar(path: Path) -> Images:
    """Read one batch of CIFAR-10, python version."""
    try:
        batch = _ArraysOnly(io.BytesIO(read(path)), encoding="bytes").load()
        x, y = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
    except DataError:
        raise
    except Exception as error:  # a corrupted pickle may raise almost anything
        raise DataError(f"{path} must be a batch of CIFAR-10, python version, got: {error}") from error
    if x.dtype != np.uint8 or x.shape != (len(y), 3072) or y.dtype.kind not in "iu" or y.ndim != 1 or not len(y):
        raise DataError(f"{path} must hold rows of 3072 bytes and a label each, got {x.shape} and {y.shape}")
    if not 0 <= y.min() <= y.max() < CLASSES:
        raise DataError(f"{path} must hold labels from 0 to {CLASSES - 1}, got {y.min()} to {y.max()}")
    return x.reshape(-1, 3, 32, 32), y.astype(np.int64)
