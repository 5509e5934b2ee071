"""The end of a backward pass of FSDP: one exchange of all shards that this rank holds, between replicas.

FSDP reduces each module's gradients within the node and adds them to `.grad`. What `.grad` held before is set
aside first, so that the exchange sees only this pass, and added again afterwards: accumulation works as with plain
FSDP. At the end of the pass, the local shards of all parameters are one vector for the reducer.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from gradsieve import ops
from gradsieve.comm.collectives import all_gather
from gradsieve.comm.step import Sent
from gradsieve.gradients import largest_update
from gradsieve.reducer import SparseReducer
from gradsieve.reports import StepReport
from gradsieve.share.weights import flat, local
from gradsieve.state.agreement import tell
from gradsieve.state.replicas import check_replicas
from gradsieve.totals import Totals
from gradsieve.worlds import ProcessGroupWorld
from gradsieve.worlds.waiting import during


class ShardHook:
    """The hook of one model; `report` is that of the last backward pass."""

    part = ""  # of a checkpoint's folder: ranks with other shards have their own

    def __init__(
        self,
        reducer: SparseReducer,
        world: ProcessGroupWorld,
        parameters: Mapping[str, nn.Parameter],
        siblings: dist.ProcessGroup,
        *,
        scaler: Any,
        check_every: int,
    ) -> None:
        self.reducer, self.world = reducer, world
        self.parameters, self.scaler, self.check_every = parameters, scaler, check_every
        self.scale = 1.0  # of the loss, in the units of which residuals are
        self.report: StepReport | None = None
        self.totals = Totals(sum(local(each).numel() for each in parameters.values()), world.size)
        self._under_way = False
        self._kept: dict[int, tuple[nn.Parameter, Tensor | None]] = {}  # gradients of passes before this one
        first = local(next(iter(parameters.values())))
        # The ranks of this node, which hold the other shards of the same replica.
        self.node = ProcessGroupWorld(siblings, world.timeout, device=first.device)
        limit = min(largest_update(local(each).dtype) for each in parameters.values())
        reducer.open(self.totals.n, first.device, limit)

    def on_ready(self, parameters: Sequence[nn.Parameter], reduced: Tensor) -> None:
        """Called when gradients of these parameters are reduced within the node, but not yet in `.grad`."""
        if not self._under_way:
            self._under_way = True
            Variable._execution_engine.queue_callback(self._end_of_backward)
        for parameter in parameters:
            if id(parameter) not in self._kept:  # a module may be used twice in a pass
                self._kept[id(parameter)] = parameter, parameter.grad
                parameter.grad = None

    def drop_unfinished(self, *called_with: Any) -> None:
        """Forget a backward pass that raised an error before all gradients were ready."""
        if self._under_way:
            self._under_way = False
            self.reducer.abandon()
            for parameter, grad in self._kept.values():
                parameter.grad = grad
            self._kept = {}

    def together(self, call: str) -> None:
        """Wait until all ranks have made a call, of all nodes and shards; raises an error if one does not."""
        self.world.watch.together(call)
        self.node.watch.together(call)

    def beside(self, text: str) -> list[str]:
        """Exchange a text with the ranks of this node; returns those of all shards."""
        return self.node.run([tell(text)])[0]

    def check_replicas(self) -> None:
        """Compare all replicas' shards."""
        shards = {name: local(parameter) for name, parameter in self.parameters.items()}
        self.world.run([check_replicas(shards, self.reducer.step)])

    def _end_of_backward(self) -> None:
        with torch.no_grad():
            try:
                with during(f"step {self.reducer.step}"):
                    self._exchange()
            except BaseException:
                self.drop_unfinished()
                raise
        self._under_way = False

    def _exchange(self) -> None:
        if self.check_every and self.reducer.step and self.reducer.step % self.check_every == 0:
            self.check_replicas()
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
        if scale != self.scale:
            self.reducer.rescale(scale / self.scale)
            self.scale = scale
        pieces = [_piece(parameter) for parameter in self.parameters.values()]
        if not self._agreed(all(ops.all_finite(piece) for piece in pieces)):
            # A NaN in one shard counts for all shards: otherwise some would make a step and others not.
            next(piece for piece in pieces if len(piece)).fill_(torch.nan)
        self.reducer.begin()
        start = 0
        for parameter, piece in zip(self.parameters.values(), pieces, strict=True):
            wide = piece.element_size() >= torch.float32.itemsize
            before = piece if wide else torch.empty_like(piece, dtype=torch.float32)
            self.reducer.add(
                piece, start, before, hold_back=parameter.grad is None and bool(piece.isfinite().all())
            )
            start += len(piece)
        sent = self.world.run([self.reducer.finish()])[0]
        if self._agreed(sent.finite) != sent.finite:
            raise RuntimeError("the sum of one shard's gradients is not finite, those of other shards are")
        started = time.perf_counter()
        self._write_(sent, pieces)
        self.reducer.note_write(time.perf_counter() - started)
        self.report = self.reducer.report
        assert self.report is not None
        self.totals = self.totals.with_step(self.report)

    def _agreed(self, finite: bool) -> bool:
        """Whether a condition holds on all ranks of the node, whose shards are parts of one model."""
        if self.node.size == 1:
            return finite
        own = torch.tensor([finite], dtype=torch.uint8, device=self.reducer.residual.device)
        return all(map(bool, self.node.run([all_gather("shards of the node", own, [1] * self.node.size)])[0]))

    def _write_(self, sent: Sent, pieces: list[Tensor]) -> None:
        """Write the update in place of this pass's gradients, and add the gradients of earlier passes."""
        if not sent.finite:
            for piece in pieces:
                piece.fill_(torch.nan)
        elif sent.indices is None:
            for piece, values in zip(pieces, sent.values.split([len(piece) for piece in pieces]), strict=True):
                piece.copy_(values)
        else:
            for piece in pieces:
                piece.zero_()
            where, order = sent.indices.sort()
            ops.scatter_pieces_(pieces, where, sent.values[order])
        for parameter, piece in zip(self.parameters.values(), pieces, strict=True):
            if parameter.grad is None and sent.finite and bool(piece.any()):  # only other replicas used it
                parameter.grad = torch.zeros_like(parameter)
                flat(parameter.grad).copy_(piece)
        for parameter, grad in self._kept.values():
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
        self._kept = {}


def _piece(parameter: nn.Parameter) -> Tensor:
    """This rank's gradient of a parameter itself, flat; zeros where there is none."""
    if parameter.grad is None:
        return torch.zeros_like(flat(parameter))
    return flat(parameter.grad)
