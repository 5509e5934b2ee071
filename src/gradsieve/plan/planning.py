"""`plan`: predict the step time of plain DDP, torch's hooks, `sparsify` and `share`, and recommend one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsieve import ops
from gradsieve._check import BadInput, BadType, at_least, fraction, list_of, number, one_of, positive
from gradsieve.comm.wire import VALUES
from gradsieve.plan import local, overhead, probe
from gradsieve.plan.links import BACKENDS, LATENCY_MS, Link, parse_rate
from gradsieve.plan.local import Shapes
from gradsieve.plan.outcome import Plan
from gradsieve.plan.ways_of import DENSITIES, EVERY, GRADIENTS, OVERLAP, RANKS, Job, ways_of
from gradsieve.worlds import ProcessGroupWorld

MOST_WORKERS, MOST_PARAMETERS = 1 << 20, 10**14


def plan(
    model: nn.Module | int,
    workers: int | None = None,
    link: str | Link | None = None,
    step_ms: float | None = None,
    *,
    latency_ms: float = LATENCY_MS,
    loss: Callable[[], Tensor] | None = None,
    sparsifier: str = GRADIENTS[0],
    densities: Sequence[float] = DENSITIES,
    every: Sequence[int] = EVERY,
    ranks: Sequence[int] = RANKS,
    values: str = "fp32",
    overlap: float = OVERLAP,
    backend: str | None = None,
) -> Plan:
    """Predict milliseconds per step of each way to train, and recommend one, or plain DDP.

    Whatever is not given is measured: the link and the number of workers on the ranks of the process group, if any
    (every rank must call it), and the computing time with `loss`. Kernels are always timed here.

    Args:
        model: a module, or its number of parameters.
        workers: number of workers, each with its own link.
        link: bandwidth such as "100mbit", or a `Link`.
        step_ms: milliseconds of a forward pass, a backward pass and an optimizer step on one worker alone.
        latency_ms: latency of the network, if the link is given as a bandwidth.
        loss: computes the loss of a batch; used to measure `step_ms`.
        sparsifier: sparsifier of gradients, "shared_threshold" or "exdyna".
        densities, every, ranks: values to compare; `ranks` are those of PowerSGD.
        values: format of sent values, "fp32", "bf16" or "fp8".
        overlap: average number of workers that pick the same position with "shared_threshold": `report.selected /
            report.union` of a run. A higher overlap sends more positions.
        backend: "gloo" or "nccl"; by default that of the process group, or gloo.

    >>> import gradsieve
    >>> found = gradsieve.plan(1_000_000, workers=4, link="20mbit", step_ms=50, densities=[0.01], every=[1])
    >>> found.best.family
    'weights'
    """
    n, shapes, device = _model(model)
    for density in list_of("densities", densities):
        fraction("density", density)
    for often in list_of("every", every):
        at_least("every", often, 1)
    for rank in list_of("ranks", ranks):
        at_least("PowerSGD's rank", rank, 1)
    one_of("values", values, VALUES)
    if positive("overlap", overlap) < 1:
        raise BadInput(f"overlap must be at least 1, got {overlap}")
    one_of("sparsifier", sparsifier, GRADIENTS)
    world = ProcessGroupWorld() if dist.is_available() and dist.is_initialized() else None
    measured = link is None
    link, workers = _network(link, latency_ms, workers, backend, world, device)
    compute = _compute(model, step_ms, loss, world, device)
    busy, crowding = (1.0, 1.0) if world is None else probe.contention(world, device)
    ops.warm_up()
    job = Job(n, shapes, workers, compute, busy, crowding)
    if world is not None and measured and workers > 1:
        job = replace(job, overhead=overhead.measure(world, link, device, job, sparsifier, values))
    return Plan(n, workers, link, compute, ways_of(job, sparsifier, densities, every, ranks, values, overlap))


def _model(model: nn.Module | int) -> tuple[int, Shapes, torch.device]:
    if isinstance(model, nn.Module):
        found = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not found:
            raise BadInput("model must have a trainable parameter, got none")
        device = found[0].device if found[0].device.type != "meta" else torch.device("cpu")
        return sum(each.numel() for each in found), [tuple(each.shape) for each in found], device
    if isinstance(model, bool) or not isinstance(model, int):
        raise BadType(f"model must be a torch.nn.Module or a number of parameters, got {model!r}")
    if at_least("parameters", model, 1) > MOST_PARAMETERS:
        raise BadInput(f"parameters must be at most {MOST_PARAMETERS:,}, got a number of {len(str(model))} digits")
    return model, local.shapes_of(model), torch.device("cpu")


def _network(
    link: str | Link | None,
    latency_ms: float,
    workers: int | None,
    backend: str | None,
    world: ProcessGroupWorld | None,
    device: torch.device,
) -> tuple[Link, int]:
    one_of("backend", backend, [None, *BACKENDS])
    if world is None and (link is None or workers is None):
        raise BadInput(
            "workers and link must be given, as in workers=8, link='100mbit', unless the ranks of a process group "
            "measure them"
        )
    if link is None:
        assert world is not None
        if world.size == 1:
            raise BadInput("link must be given, as one process alone cannot measure it, such as link='100mbit'")
        link = probe.measure_link(world, device)
    elif isinstance(link, str):
        if not 0 <= number("latency_ms", latency_ms) < math.inf:
            raise BadInput(f"latency_ms must be at least 0 and finite, got {latency_ms}")
        link = Link(parse_rate(link) / 8, latency_ms / 1e3, backend=backend or "gloo")
    elif not isinstance(link, Link):
        raise BadType(f"link must be a bandwidth such as '100mbit', got {link!r}")
    if workers is None:
        assert world is not None
        workers = world.size
    if at_least("workers", workers, 1) > MOST_WORKERS:
        raise BadInput(f"workers must be at most {MOST_WORKERS:,}, got {workers:,}")
    return link, workers


def _compute(
    model: nn.Module | int,
    step_ms: float | None,
    loss: Callable[[], Tensor] | None,
    world: ProcessGroupWorld | None,
    device: torch.device,
) -> float:
    if step_ms is not None:
        return positive("step_ms", step_ms) / 1e3
    if loss is None or not isinstance(model, nn.Module):
        raise BadInput("step_ms must be given, or a model and its loss to measure it")
    seconds = probe.measure_step(model, loss)
    return seconds if world is None else probe.mean(seconds, world, device)
