"""Start a run: with virtual workers, in processes on this machine, or in torchrun's processes."""

import gc
import os
import secrets
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from gradsieve._check import BadInput
from gradsieve_lab._files import try_lock
from gradsieve_lab.conditions import conditions
from gradsieve_lab.launch import Place, Post, run_workers
from gradsieve_lab.netlab.network import network
from gradsieve_lab.runs.config import Config, resolve
from gradsieve_lab.runs.engines import Engine, ProcessEngine, VirtualEngine, make_feeds
from gradsieve_lab.runs.feed import Feed
from gradsieve_lab.runs.methods import REPLICATED
from gradsieve_lab.runs.records import VERSION, Recorder, Run, cut_back, read_run
from gradsieve_lab.runs.replica_engines import ProcessReplica, VirtualReplicas
from gradsieve_lab.runs.restarts import agent, own_run
from gradsieve_lab.runs.settings import Settings
from gradsieve_lab.runs.training import Starting, Training
from gradsieve_lab.tasks import Data, Task

Listen = Callable[[Any], None]
_ALWAYS_ALLOWED, _PROCESSES_PER_CORE = 32, 8
_SMALL_MODEL = 1_000_000  # parameters below which threads wait for each other longer than they compute


class Stop:
    """A request to stop, by Ctrl-C or a signal; a second one interrupts."""

    def __init__(self) -> None:
        self.signal = 0

    def requested(self) -> bool:
        return self.signal != 0

    @contextmanager
    def watching(self) -> Iterator["Stop"]:
        """Treat a first SIGINT, SIGTERM or SIGHUP as a request; a second one interrupts.

        A signal that is ignored stays so: `nohup` ignores SIGHUP.
        """
        kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        watched = [kind for kind in kinds if signal.getsignal(kind) is not signal.SIG_IGN]
        before = {kind: signal.signal(kind, self._note) for kind in watched}
        try:
            yield self
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number


@dataclass(frozen=True)
class Job:
    """What all workers of a run are given."""

    settings: Settings
    folder: Path
    resume: bool
    command: str
    launch: tuple[str, ...]  # what identifies who began the run: the agents of torchrun, or a random text


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def torchrun_workers() -> int:
    return int(os.environ["WORLD_SIZE"])


def leads() -> bool:
    """Whether this process reports for the run."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def run(settings: Settings, folder: Path, listen: Listen, stop: Stop, *, resume: bool = False) -> Run | None:
    """Run from the start or from a checkpoint, in `folder`; returns the record, or None if another of torchrun's
    processes writes it. A new run that fails before its first step leaves no folder behind."""
    mine = agent() if under_torchrun() else secrets.token_hex(8)
    job = Job(settings, folder, resume, command_line(), (mine,))
    try:
        _start(job, listen, stop)
    except BaseException:
        if leads() and not resume:
            _remove_unless_begun(job)
        raise
    return read_run(folder) if leads() else None


def _start(job: Job, listen: Listen, stop: Stop) -> None:
    settings = job.settings
    if under_torchrun() and not settings.virtual:
        if settings.lab_hosts:
            raise BadInput("a lab starts its own processes, got torchrun: leave one of them out")
        _join(job, listen, stop)
        return
    if leads():
        job = _claimed(job)
    if settings.virtual:
        with _restored_threads():
            _work(Post(0, settings.workers, listen, stop.requested), job)
        return
    _check_processes(settings.workers)
    _prepare(settings)  # raises errors before any worker is started
    with _places(settings) as places:
        listen(Starting(settings.label or settings.sparsifier, settings.workers))
        run_workers(
            _work,
            settings.workers,
            job,
            timeout=settings.timeout,
            places=places,
            listen=listen,
            stop_requested=stop.requested,
        )


@contextmanager
def _restored_threads() -> Iterator[None]:
    """Restore torch's number of threads after a virtual run."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _places(settings: Settings) -> Iterator[list[Place] | None]:
    """The places of workers: loopback (None), or the hosts of a lab that is removed on exit."""
    if not settings.lab_hosts:
        yield None
        return
    with network(settings.links()) as made:
        yield made.places(settings.workers)


def _claimed(job: Job) -> Job:
    """The job with a folder that is new, or with a run to resume that this launch of torchrun began.

    What it began without getting to a checkpoint is removed. A folder of another launch is never touched.
    """
    if job.resume:
        return job
    if not under_torchrun() or own_run(job.folder, job.launch, job.command) is None:
        check_new(job.folder)
        return job
    if (job.folder / "checkpoint" / "latest.json").exists():
        return replace(job, resume=True)
    with _locked(job.folder):
        shutil.rmtree(job.folder)
    return job


def check_new(folder: Path) -> None:
    if folder.exists():
        raise BadInput(f"out must be a new folder, got {folder}, which exists")


def _check_processes(workers: int) -> None:
    most = max(_ALWAYS_ALLOWED, _PROCESSES_PER_CORE * (os.cpu_count() or 1))
    if workers > most:
        raise BadInput(
            f"workers must be at most {most} as processes of this machine, got {workers}: take --virtual"
        )


def _prepare(settings: Settings) -> tuple[Task, Data, list[Feed], Config]:
    """Read the data and divide it among workers; problems with either are raised as `BadInput`."""
    try:
        task = settings.make_task()
        data = task.load()
        config = resolve(settings, task)
        return task, data, make_feeds(task, data, config), config
    except ValueError as error:
        raise BadInput(str(error)) from error


def _remove_unless_begun(job: Job) -> None:
    """Remove the folder that this run made, if its record has no step."""
    run = own_run(job.folder, job.launch, job.command)
    if run is not None and not run.steps:
        with suppress(BadInput), _locked(job.folder):  # another process of the launch may be at it
            shutil.rmtree(job.folder, ignore_errors=True)


def _join(job: Job, listen: Listen, stop: Stop) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.settings.timeout))
    agents: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(agents, agent())
    job = _of_leader(replace(job, launch=tuple(sorted(set(agents)))))
    _work(Post(dist.get_rank(), dist.get_world_size(), listen, stop.requested), job)
    gc.collect()  # models that outlive their process group can crash gloo at exit
    dist.barrier()
    dist.destroy_process_group()


def _of_leader(job: Job) -> Job:
    """The leader's job, whose folder all use; if the leader refuses it, only the leader says why."""
    received: list[Any] = [job, ""]
    if leads():
        try:
            received[0] = _claimed(job)
        except BadInput as problem:
            received[1] = str(problem)
    dist.broadcast_object_list(received)
    job, problem_found = received
    if problem_found:
        dist.destroy_process_group()
        raise BadInput(problem_found) if leads() else SystemExit(2)
    return job


def _work(post: Post, job: Job) -> None:
    """The whole run of one worker, or of all virtual workers."""
    task, data, feeds, config = _prepare(job.settings)
    engine = _engine_kind(config)(task, data, feeds, config)
    size = sum(parameter.numel() for parameter in engine.model.parameters())
    if config.virtual and size < _SMALL_MODEL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    training = Training(engine, config, job.folder, post)
    if engine.leads and not job.resume:
        _begin(config, job, {"n": size, "metric": asdict(task.METRIC)})
    with _locked(job.folder) if engine.leads else nullcontext():
        if job.resume:
            step = training.load()
            if engine.leads:
                training.go_on(cut_back(job.folder, step, config.as_dict(), job.launch))
        training.run()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the run's folder while the run lasts."""
    descriptor = try_lock(folder / ".lock")
    if descriptor is None:
        raise BadInput(f"{folder} is in use by another process: wait until it ends")
    try:
        yield
    finally:
        (folder / ".lock").unlink(missing_ok=True)
        os.close(descriptor)


def _engine_kind(config: Config) -> Callable[..., Engine]:
    if config.sparsifier in REPLICATED:
        return VirtualReplicas if config.virtual else ProcessReplica
    return VirtualEngine if config.virtual else ProcessEngine


def _begin(config: Config, job: Job, about: dict[str, Any]) -> None:
    """Make the run's folder, with the first line of its record."""
    try:
        job.folder.mkdir(parents=True)
    except OSError as problem:
        raise BadInput(f"{job.folder} could not be made: {problem.strerror}") from problem
    name = config.label or config.sparsifier
    head = {"kind": "run", "version": VERSION, "name": name, "settings": config.as_dict(), **about}
    head |= {"command": job.command, "launch": list(job.launch), "conditions": conditions()}
    try:
        Recorder(job.folder).add([head])
    except BaseException:
        shutil.rmtree(job.folder, ignore_errors=True)
        raise


def command_line(program: str = "gradsieve") -> str:
    return f"{program} {shlex.join(sys.argv[1:])}"
