"""Workers that leave, join and die under torchrun's elastic agent: does training still end where it should?

Run it:  python -m studies.faults.elastic --way share > benchmarks/data/faults-elastic-share.json

Each worker has an agent of its own, as on a machine of its own. At random steps an agent leaves (SIGTERM), dies
with its worker (SIGKILL), loses its worker, or a new one joins; torchrun then restarts all workers, which continue
from the last checkpoint with as many as there are.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from safetensors.torch import save_file

from gradsieve_lab.conditions import conditions
from gradsieve_lab.launch import Post, run_workers
from gradsieve_lab.tasks import make_task
from gradsieve_lab.tasks._images import ImageTask
from studies.faults.elastic_worker import WAYS, Job, train

FEWEST, MOST = 2, 4  # workers
PATIENCE_S = 120.0  # for one restart; this machine may be busy
_RENDEZVOUS = "is_host=0,last_call_timeout=1,join_timeout=90,keep_alive_interval=1,keep_alive_max_attempt=3"
_POLL_S = 0.05


class Agents:
    """The agents of torchrun, one per worker. The store is here, so that any of them may leave."""

    def __init__(self, job: Job) -> None:
        self.job, self.running = job, list[subprocess.Popen[bytes]]()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._log = (Path(job.folder) / "log").open("ab")

    def join(self) -> None:
        options = ["--nnodes", f"{FEWEST}:{MOST}", "--nproc-per-node", "1", "--max-restarts", "1000"]
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._store.port}"]
        options += ["--rdzv-id", "elastic", "--rdzv-conf", _RENDEZVOUS, "--local-addr", "127.0.0.1"]
        worker = ["-m", "studies.faults.elastic_worker", json.dumps(self.job.to_dict())]
        self.running.append(
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *options, *worker],
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            )
        )

    def leave(self, agent: subprocess.Popen[bytes]) -> None:
        """The agent ends its worker, tells the others, and exits."""
        agent.terminate()
        self.running.remove(agent)

    def die(self, agent: subprocess.Popen[bytes]) -> None:
        """As if the machine had lost power: nobody is told."""
        for pid in [agent.pid, *_children(agent.pid)]:
            _kill(pid)
        agent.wait()
        self.running.remove(agent)

    def lose_worker(self, agent: subprocess.Popen[bytes]) -> None:
        for pid in _children(agent.pid):
            _kill(pid)

    def close(self) -> None:
        for agent in self.running:
            for pid in [agent.pid, *_children(agent.pid)]:
                _kill(pid)
            agent.wait()
        self._log.close()


def _children(parent: int) -> list[int]:
    with suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return []


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def disturbed(job: Job, events: int, chance: random.Random) -> dict[str, Any]:
    """Train under torchrun while the membership changes `events` times; the final metrics, and every event."""
    agents, found = Agents(job), []
    # Training goes on while a worker starts: one that joined after the last step would find the store closed.
    moments = sorted(chance.sample(range(20, job.steps * 3 // 5), events))
    try:
        for _ in range(MOST):
            agents.join()
        _await(job, agents, 1)
        for moment in moments:
            _await(job, agents, moment)
            found.append(_event(job, agents, chance))
        result = _result(job, agents)
    finally:
        agents.close()
    return {**result, "events": found}


def _event(job: Job, agents: Agents, chance: random.Random) -> dict[str, Any]:
    kinds = ["worker dies"]
    kinds += ["agent leaves", "agent dies"] if len(agents.running) > FEWEST else []
    kinds += ["agent joins"] * 2 if len(agents.running) < MOST else []
    kind, before, started = chance.choice(kinds), job.progress(), time.monotonic()
    agent = chance.choice(agents.running)
    if kind == "agent joins":
        agents.join()
    else:
        {"agent leaves": agents.leave, "agent dies": agents.die, "worker dies": agents.lose_worker}[kind](agent)
    after = _await(job, agents, before["step"], launch_after=before["launch"])
    return {
        "kind": kind,
        "step": before["step"],
        "from step": after["first"],
        "workers": after["workers"],
        "seconds": round(time.monotonic() - started, 1),
    }


def _await(job: Job, agents: Agents, step: int, launch_after: str = "") -> dict[str, Any]:
    """Wait until workers have reached this step, in a later launch than the named one."""
    deadline, seen = time.monotonic() + PATIENCE_S, -1
    while True:
        now = job.progress()
        if now and now["step"] >= step and now["launch"] != launch_after:
            return now
        if now and now["step"] != seen:
            deadline, seen = time.monotonic() + PATIENCE_S, now["step"]
        ended = [agent.returncode for agent in agents.running if agent.poll() is not None]
        if ended or time.monotonic() > deadline:
            words = f"agents exited with {ended}" if ended else f"no step for {PATIENCE_S:.0f} s"
            raise RuntimeError(f"{words} at {now}: {Path(job.folder, 'log').read_text()[-3000:]}")
        time.sleep(_POLL_S)


def _result(job: Job, agents: Agents) -> dict[str, Any]:
    for agent in agents.running:
        if agent.wait(PATIENCE_S + job.steps * (job.pause + 0.1)):
            raise RuntimeError(f"an agent exited with {agent.returncode}")
    found: dict[str, Any] = json.loads((Path(job.folder) / "result.json").read_text())
    return found


def _undisturbed(post: Post, job: dict[str, Any]) -> dict[str, Any] | None:
    torch.set_num_threads(1)
    return train(Job(**job))


def calm(job: Job, workers: int) -> dict[str, Any]:
    """The metrics of a run whose membership does not change."""
    found: dict[str, Any] = run_workers(_undisturbed, workers, job.to_dict())[0]
    return found


def prepare(folder: Path) -> None:
    """Write the digits to a file: workers start often, and must start fast."""
    task = make_task("mlp")
    assert isinstance(task, ImageTask)
    data, names = task.load(), ("train x", "train y", "test x", "test y")
    parts = [task.inputs(data.train), data.train[1], task.inputs(data.test), data.test[1]]
    save_file(dict(zip(names, parts, strict=True)), folder / "data.safetensors")


def study(
    events: Annotated[int, typer.Option(min=0, help="Number of changes of the membership.")] = 50,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 3000,
    way: Annotated[str, typer.Option(help="sparsify or share.")] = WAYS[0],
    seeds: Annotated[int, typer.Option(help="Undisturbed runs, with 4 and with 2 workers each.")] = 3,
    seed: Annotated[int, typer.Option(help="Same seed, same events.")] = 0,
) -> None:
    """Print the metrics of a run with changing membership, beside those of undisturbed runs."""
    with tempfile.TemporaryDirectory(prefix="elastic-") as scratch:
        prepare(Path(scratch))
        runs = []
        for workers in (MOST, FEWEST):
            for number in range(seeds):
                job = Job(scratch, f"calm-{workers}-{number}", way, steps, seed=number)
                runs.append({"workers": workers, **calm(job, workers)})
        job = Job(scratch, "disturbed", way, steps, seed=seeds, pause=0.1)
        result = disturbed(job, events, random.Random(seed))
    seconds = [event["seconds"] for event in result["events"]]
    summary = {
        "way": way,
        "steps": steps,
        "calm": runs,
        "disturbed": result,
        "median seconds until training went on": statistics.median(seconds) if seconds else None,
        "most seconds": max(seconds, default=None),
        "conditions": conditions(),
    }
    typer.echo(json.dumps(summary, indent=2))


if __name__ == "__main__":
    typer.run(study)
