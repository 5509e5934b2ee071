"""The handle of `share`: rounds after optimizer steps, the agreed weights, checkpoints.

Every worker trains its own replica. After an optimizer step, the workers average the weights that drifted farthest
from the value they last agreed on. Gradients are not exchanged.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsieve import ops
from gradsieve._check import BadInput, dict_of, one_of, path_of
from gradsieve.regrouping import Regrouped
from gradsieve.share.average import average_
from gradsieve.share.background import Background
from gradsieve.share.broadcast import broadcast_, start_alike_
from gradsieve.share.driver import Driver, Outcome
from gradsieve.share.gradients import average_gradients_
from gradsieve.share.outcome import NonFiniteWeights, ShareReport, complaint
from gradsieve.share.parameters import parameter_counts, part_of
from gradsieve.share.regrouping import regroup_replica
from gradsieve.share.replica import Replica
from gradsieve.share.weights import local
from gradsieve.sparsifiers import name_of
from gradsieve.state import checkpoint
from gradsieve.state.replicas import check_replicas
from gradsieve.totals import Totals
from gradsieve.worlds import PeerLost, ProcessGroupWorld
from gradsieve.worlds.streams import SideStream

BUFFERS_EVERY = 50  # rounds after which all workers take rank 0's buffers, such as running statistics


class ShareSieve:
    """What `share` returns: reports, state, checkpoints, and the agreed weights. `report` is the last round's."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        replica: Replica,
        world: ProcessGroupWorld,
        *,
        delay: int,
        check_every: int,
        scaler: Any,
        join: bool,
    ) -> None:
        self.replica, self.world, self.check_every = replica, world, check_every
        self._model, self._optimizers = model, optimizers
        self._counts = parameter_counts(optimizers)
        self._inside = False
        self._stepped: set[int] = set()  # optimizers whose step was not skipped
        self._workers = world.size  # that took part in this dense step
        self._absent = False  # this rank did not
        self._uneven = False  # some rank has skipped a dense step
        background: Background[list[Outcome]] | None = None
        self._beside = world
        if one_of("delay", delay, (0, 1)):  # a group must not be used from two threads
            background = Background("gradsieve-share", SideStream(replica.weights.shared.device))
            self._beside = world.again()
        self._background = background
        self._totals = Totals(replica.weights.n, world.size)
        self.driver = Driver([replica], self._beside, delay, background)
        if join:
            self._regroup(joins=True)
        else:
            start = [*map(local, model.parameters()), *self._buffers()]
            world.run([start_alike_(start, replica.labels, world.rank, world.size)])
            replica.weights.agree_()
        self._hooks = [each.register_step_pre_hook(self._before) for each in optimizers]
        self._hooks.append(optimizers[-1].register_step_post_hook(lambda *called_with: self._complete()))
        if scaler is not None:
            self._watch(scaler)

    @property
    def report(self) -> ShareReport | None:
        return self.replica.full_report()

    def summary(self) -> Totals:
        """Totals since `share` was called: steps, bytes, density, seconds. Printable."""
        return self._totals

    def __repr__(self) -> str:
        replica = self.replica
        return (
            f"ShareSieve({name_of(replica.sparsifier)!r}, every={replica.every}, delay={self.driver.delay}, "
            f"values={replica.values!r}, {replica.weights.n:,} weights, {self.world.size} workers, "
            f"step {replica.steps})"
        )

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """A context in which the model holds the agreed weights, the same on all ranks, for evaluating or saving.

        Nothing is sent, so one rank alone may enter it. Afterwards this rank's own weights are back.
        """
        if self._inside:
            raise RuntimeError("shared() must be left before it is entered again")
        self.driver.wait()
        self._inside = True
        try:
            with self.replica.agreed():
                yield
        finally:
            self._inside = False

    def finish(self) -> None:
        """Average all weights and floating-point buffers, so that replicas are equal; every rank must call it."""
        self.world.watch.together("finish")
        self.driver.flush()
        self._settle()
        self.world.run([self.replica.average()])
        self.world.run([average_(self._buffers(), self.world.size)])
        self._totals = self._totals.with_full_exchange()

    def close(self) -> None:
        """Remove all hooks; a round that was exchanged but not applied is applied."""
        self.driver.flush()
        for hook in self._hooks:
            hook.remove()
        if self._background is not None:
            self._background.close()
        if (steps := self.replica.failed_after) is not None:  # others may be gone: nobody is asked whose they are
            raise NonFiniteWeights(complaint(["those of some rank"], steps))

    def regroup(self, process_group: dist.ProcessGroup | None = None) -> Regrouped:
        """Continue with another group, of any size and membership, after `PeerLost` or at any other time.

        All of its workers call it; newcomers call `share(..., join=True)` instead. Survivors keep their weights,
        and newcomers start from the agreed ones. Drift from before a failed round is averaged in a later one.
        """
        # Of the round that failed beside the last step; ValueError if its group was destroyed before it began.
        with contextlib.suppress(PeerLost, RuntimeError, ValueError):
            self.driver.flush()
        world = ProcessGroupWorld(process_group, self.world.timeout, device=self.world.device)
        for old in (self._beside, self.world):
            old.close()
        self.world = self._beside = world
        if self.driver.delay:
            self._beside = world.again()
        self.driver.world = self._beside
        return self._regroup(joins=False)

    def _regroup(self, *, joins: bool) -> Regrouped:
        program = regroup_replica(self.replica, self.world.rank, self.world.size, self._buffers(), joins=joins)
        return self.world.run([program])[0]

    def check_replicas(self) -> None:
        """Compare all ranks' agreed weights; every rank must call it. Raises `ReplicasDiffer`."""
        self.world.watch.together("check_replicas")
        self._compare()

    def _compare(self) -> None:
        self._settle()
        self.world.run([check_replicas(self.replica.weights.by_name(), self.replica.steps)])

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, its weights among it: every rank has its own."""
        pending = self.driver.pending
        return {**self.replica.state_dict(), "pending": self.replica.made_state(pending[0] if pending else None)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict()` returned on this rank, with the same world size."""
        self._load(dict_of("state_dict", state_dict), resized=False)

    def _load(self, state: dict[str, Any], *, resized: bool) -> None:
        if "pending" not in state:
            raise BadInput(f"state must have the key pending, got {sorted(state)}")
        made = state.pop("pending")
        self.driver.wait()
        self.replica.load_state_dict(state, resized=resized)
        pending = self.replica.load_made_state(made)
        self.driver.pending = None if pending is None else [pending]

    def save(self, folder: str | Path, extra: Mapping[str, Any] | None = None, *, shared: bool = True) -> None:
        """Write a checkpoint; every rank must call it. A crash leaves the previous one whole.

        Args:
            folder: one that all ranks see.
            extra: each rank's own, such as its optimizer's state: dicts and lists of numbers, strings, tensors.
            shared: False if there is no such folder: every rank then writes and reads its own part, in a folder of
                its own below `folder`. The number of ranks must stay the same.
        """

        self.world.watch.together("save")
        self._settle()
        build = partial(self._content, folder, lambda: {**self.state_dict(), "own": dict_of("extra", extra)})
        self.world.run([checkpoint.save_built(build, self.replica.labels, shared=shared)])

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Read the last checkpoint, of any world size; every rank must call it. Nothing is loaded partially.

        Returns this rank's `extra`; keys that were numbers come back as strings. With another world size
        all replicas start from the mean of the old ones, and rank r gets the `extra` of rank r modulo their number.
        """
        self.world.watch.together("load")
        build = partial(self._content, folder, self.replica.state_dict)
        state = self.world.run([checkpoint.load_built(build, self.replica.labels)])[0]
        del state["extra"]
        extra: dict[str, Any] = state.pop("own")
        if resized := state.pop("resized"):
            state["pending"] = {}
        self._load(state, resized=resized)
        return extra

    def _content(self, folder: Any, state: Callable[[], dict[str, Any]]) -> checkpoint.Content:
        place = path_of("folder", folder) / part_of(self.replica.labels, self.world.group)
        return checkpoint.Content(place, ops.on_host(state()))

    def _buffers(self) -> list[Tensor]:
        return [local(buffer) for buffer in self._model.buffers()]

    def _before(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        if self._inside:
            raise RuntimeError("the optimizer must not step inside `with sieve.shared():`")
        self._check_parameters()
        self.driver.wait()
        self._stepped.add(id(optimizer))
        if self.replica.dense:
            self._average_gradients(optimizer, takes_part=True)

    def _average_gradients(self, optimizer: Optimizer, *, takes_part: bool) -> None:
        mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        parameters = [parameter for parameter in mine if parameter.requires_grad and local(parameter).numel()]
        program = average_gradients_(parameters, takes_part=takes_part)
        self._workers = self.world.run([program])[0]
        if not takes_part:
            self._absent = True

    def _complete(self) -> None:
        """The last optimizer has stepped, or its step was skipped on this rank."""
        if self.replica.dense:
            self._agree_after_dense_step()
            self._totals = self._totals.with_full_exchange()
        if not self.driver.after_step():
            self._totals = self._totals.with_silent_step()
            return
        report = self.replica.report
        assert report is not None
        self._totals = self._totals.with_step(report)
        if self.replica.rank in report.restored:
            self._forget_moments()
        applied = report.round + 1  # not those made: another may be under way
        if applied % BUFFERS_EVERY == 0 and (buffers := self._buffers()):
            self.world.run([broadcast_(buffers)])
        if self.check_every and applied % self.check_every == 0:
            self._compare()

    def _settle(self) -> None:
        """What the last round has left to the next one is looked at now."""
        self.driver.wait()
        if self.world.run([self.replica.settle()])[0]:
            self._forget_moments()

    def _forget_moments(self) -> None:
        for each in self._optimizers:
            each.state.clear()  # what came with weights that are not finite is no better

    def _agree_after_dense_step(self) -> None:
        """All replicas are equal, unless steps were skipped on some ranks: their optimizers are behind since then,
        so weights are averaged, over those that took part."""
        weights, absent, self._absent = self.replica.weights, self._absent, False
        self._uneven = self._uneven or 0 < self._workers < self.world.size
        if self._uneven and self._workers:
            parts = weights.pieces
            for part in parts if absent else ():
                part.zero_()
            self.world.run([average_(parts, self._workers)])
        weights.agree_()

    def _check_parameters(self) -> None:
        if (now := parameter_counts(self._optimizers)) != self._counts:
            raise RuntimeError(
                f"the optimizer must keep the {sum(self._counts)} trainable parameters it had when share was "
                f"called, got {sum(now)}: add or unfreeze parameters first, then call share"
            )

    def _watch(self, scaler: Any) -> None:
        """A step that the scaler skips on this rank is complete, too: the others may not wait for it."""
        step: Callable[..., Any] = scaler.step

        def watched(optimizer: Optimizer, *arguments: Any, **keywords: Any) -> Any:
            self._stepped.discard(id(optimizer))
            result = step(optimizer, *arguments, **keywords)
            if id(optimizer) not in self._stepped and any(optimizer is each for each in self._optimizers):
                self.driver.wait()
                if self.replica.dense:
                    self._average_gradients(optimizer, takes_part=False)
                if optimizer is self._optimizers[-1]:
                    self._complete()
            return result

        scaler.step = watched
