"""The kernels for GPUs against the plain ones: gpu_laws.py, in a process in which Triton interprets kernels."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from gradsieve.ops import on_gpu
from gradsieve.ops.schema import SCHEMAS
from helpers import ROOT

# What proves an op right, by the names of tests in gpu_laws.py.
PROOFS = {
    "select_above": "test_select_above",
    "accumulate_select_": "test_accumulate_select",
    "log_histogram": "test_log_histogram",
    "drift_select": "test_drift_select",
    "gather_pieces": "test_pieces",
    "scatter_pieces_": "test_pieces",
    "all_finite": "test_all_finite",
    "gather_clear_": "test_gather_clear_and_scatter_update",
    "scatter_update_": "test_gather_clear_and_scatter_update",
    "pack_sorted": "test_pack_and_unpack",
    "unpack_sorted": "test_pack_and_unpack",
}


def interpret(which: str, folder: Path) -> tuple[dict[str, str], str]:
    """Names of tests with what went wrong, empty where nothing did; and all that was printed."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'gradsieve[gpu-tests]'")
    report = folder / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", "-m", which, f"--junitxml={report}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(Path(__file__).parent / "gpu_laws.py")],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=1_200,
    )
    assert report.exists(), done.stdout + done.stderr
    cases = ElementTree.parse(report).iter("testcase")
    return {case.attrib["name"]: _trouble(case) for case in cases}, done.stdout


def _trouble(case: ElementTree.Element) -> str:
    return "".join(each.text or each.tag for kind in ("failure", "error", "skipped") for each in case.iter(kind))


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return interpret("not slow", tmp_path_factory.mktemp("interpreted"))[0]


@pytest.mark.parametrize("op", SCHEMAS)
def test_same_as_reference(interpreted: dict[str, str], op: str) -> None:
    found = {name: trouble for name, trouble in interpreted.items() if name.startswith(PROOFS[op])}
    assert found
    assert not any(found.values()), "\n".join(found.values())


def test_everything_else(interpreted: dict[str, str]) -> None:
    """Positions outside, damaged messages, how often the host waits, the device that is launched on."""
    others = {name: trouble for name, trouble in interpreted.items() if not name.startswith(tuple(PROOFS.values()))}
    assert len(others) >= len(SCHEMAS)
    assert not any(others.values()), "\n".join(others.values())


@pytest.mark.slow
def test_every_size_with_every_type(tmp_path: Path) -> None:
    found, output = interpret("slow", tmp_path)
    assert len(found) > 30
    assert not any(found.values()), output


def test_chosen_by_the_dispatcher() -> None:
    if not on_gpu.available():
        pytest.skip("Triton is not installed")
    for name in SCHEMAS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"gradsieve::{name}", "CUDA")


def has_kernels(**environment: str) -> str:
    code = (
        "import sys, torch, gradsieve; before = 'triton' in sys.modules; "
        "key = torch._C._dispatch_has_kernel_for_dispatch_key; "
        "print(before, key('gradsieve::select_above', 'CUDA'), key('gradsieve::select_above', 'CPU'))"
    )
    run = [sys.executable, "-c", code]
    return subprocess.run(
        run, env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()


def test_triton_is_imported_when_needed_and_can_be_refused() -> None:
    assert has_kernels(GRADSIEVE_TRITON="1") == f"False {on_gpu.available()} True"
    assert has_kernels(GRADSIEVE_TRITON="0") == "False False True"
