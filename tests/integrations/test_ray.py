"""Ray Train: a worker dies, Ray restarts the run, and it ends as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ENVIRONMENT, HERE, launch

from helpers import skip_without

skip_without("ray")

# A cluster on loopback that ends with its driver needs no token, and no workers before they are asked for.
CLUSTER = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0"}


def test_two_workers_resume_to_the_last_bit(tmp_path: Path) -> None:
    for rank in launch("ray.train.torch", "with_local_ray.py", tmp_path):
        for found in rank.values():
            assert found["resumed"] == found["whole"]
            assert sum(found["losses"][-3:]) < sum(found["losses"][:3])
            (metrics,) = found["metrics"]
            assert metrics["loss"] == found["losses"][4]
            assert 0.095 <= metrics["gradsieve/density"] <= 0.105
            assert {"rank-0.safetensors", "rank-1.safetensors"} <= set(found["files"])


@pytest.mark.slow  # a cluster, twice
@pytest.mark.parametrize("way", ["sparsify", "share"])
def test_a_restarted_run_ends_as_one_that_was_never_stopped(way: str, tmp_path: Path) -> None:
    environment = {**os.environ, **ENVIRONMENT, **CLUSTER}
    command = [sys.executable, str(HERE / "with_ray.py"), str(tmp_path), way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["first"] == 5, "it went on from the checkpoint"
    assert 0.095 <= metrics["gradsieve/density"] <= 0.105
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["resumed"] == found["whole"]
    parts = {path.name for path in (tmp_path / "run").rglob("rank-*.safetensors")}
    assert parts == {"rank-0.safetensors", "rank-1.safetensors"}


def test_outside_of_a_worker_the_way_out_is_named() -> None:
    import torch

    from gradsieve.integrations import ray as integration

    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match="got Linear: call it in a TorchTrainer's function"):
        integration.sparsify(model)
    with pytest.raises(ValueError, match="needs a process group, got none: call it in a TorchTrainer's function"):
        integration.share(model, torch.optim.SGD(model.parameters()))
