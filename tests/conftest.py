"""Every test with an argument `sparsifier` runs for each entry of SPARSIFIERS, the example's included."""

import os

# On some CPUs the instructions that oneDNN picks for bfloat16 end torch with SIGILL. Before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from gradsieve import SPARSIFIERS
from helpers import LIBRARY

# No deadline: a test must not fail because the machine is busy. `make test-all` takes the second profile.
settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=300)
settings.load_profile("quick")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; programs under test inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # the tests run in several processes


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sparsifier" in metafunc.fixturenames:
        metafunc.parametrize("sparsifier", LIBRARY)
    if "exclusive" in metafunc.fixturenames:
        metafunc.parametrize("exclusive", [name for name in LIBRARY if SPARSIFIERS[name].EXCLUSIVE])


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """No bytes in a test's name: an archive holds the second it was packed, and workers must collect the same."""
    return argname if isinstance(val, bytes) else None
