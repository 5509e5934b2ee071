"""The communication hook: DDP calls it bucket by bucket, as gradients become ready.

Each bucket is added to the residual at once, on a side stream, which overlaps with the rest of the backward pass.
After the last bucket, one exchange for the whole model follows, updates are written into the buckets in place, and
the futures of all buckets complete.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve import ops
from gradsieve._check import BadType
from gradsieve.comm.exchange import sparse_sum
from gradsieve.comm.traffic import Ledger, metered
from gradsieve.ddp.advice import NoAdvice
from gradsieve.ddp.layout import Layout, Place
from gradsieve.reducer import SparseReducer
from gradsieve.reports import StepReport
from gradsieve.state.replicas import check_replicas
from gradsieve.totals import Totals
from gradsieve.worlds import ProcessGroupWorld
from gradsieve.worlds.streams import SideStream
from gradsieve.worlds.waiting import during


class BucketHook:
    """The hook of one model; `report` is that of the last backward pass."""

    part = ""  # of a checkpoint's folder: all ranks share it

    def __init__(
        self,
        reducer: SparseReducer,
        layout: Layout,
        world: ProcessGroupWorld,
        parameters: Mapping[str, Tensor],
        *,
        scaler: Any,
        check_every: int,
        advice: NoAdvice,
    ) -> None:
        self.reducer, self.layout, self.world = reducer, layout, world
        self.parameters, self.scaler, self.check_every = parameters, scaler, check_every
        self.advice = advice
        self.scale = 1.0  # of the loss, in the units of which residuals are
        self.report: StepReport | None = None
        self.totals = Totals(layout.n, world.size)
        self._buckets: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        self._places: list[Place] = []
        self._beside = Ledger()  # this step's traffic outside the reducer
        self._side = SideStream(next(iter(parameters.values())).device)  # beside the backward pass

    def on_bucket(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        if not isinstance(bucket, dist.GradBucket):  # type: ignore[attr-defined]
            raise BadType(
                "the hook must be called by DDP's own reducer, got a call of torch._dynamo's python_reducer: "
                'set torch._dynamo.config.optimize_ddp to "ddp_optimizer"'
            )
        buffer = bucket.buffer()
        # A future of a device's values completes with an event on the stream on which they are set.
        devices: list[int | str | torch.device] = [buffer.device] if buffer.device.type in ("cuda", "xpu") else []
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        with self._side.behind(self._side.mark()):
            self._take(bucket, buffer, future)
        if bucket.is_last():
            self._side.join()
        return future

    def _take(self, bucket: Any, buffer: Tensor, future: "torch.futures.Future[Tensor]") -> None:
        if bucket.index() == 0:
            self._begin()
        try:
            if buffer.is_sparse:
                buffer = self._mean_of_sparse(buffer)
            else:
                self._add(bucket, buffer)
            self._buckets.append((future, buffer))
            if bucket.is_last():
                with during(f"step {self.reducer.step}"):
                    self._exchange()
        except BaseException:
            self._drop()
            raise

    def drop_unfinished(self, *called_with: Any) -> None:
        """Forget a backward pass that raised an error before all gradients were ready."""
        if self._buckets:
            self._drop()

    def together(self, call: str) -> None:
        """Wait until all workers have made a call; raises an error if one does not."""
        self.world.watch.together(call)

    def beside(self, text: str) -> list[str]:
        """Exchange a text with the ranks that have other shards: there are none."""
        return [text]

    def check_replicas(self) -> None:
        """Compare all workers' parameters."""
        self.world.run([check_replicas(self.parameters, self.reducer.step)])

    def _drop(self) -> None:
        self._side.join()
        self.reducer.abandon()
        self._buckets, self._places = [], []

    def _begin(self) -> None:
        self.drop_unfinished()
        self._beside = Ledger()
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
        if scale != self.scale:
            self.reducer.rescale(scale / self.scale)
            self.scale = scale
        self.reducer.begin()

    def _add(self, bucket: Any, buffer: Tensor) -> None:
        places = self.layout.places(bucket.parameters(), len(self._buckets))
        pieces = [place.within(buffer) for place in places]
        for place, piece, unused in zip(places, pieces, self._unused(pieces), strict=True):
            # The bucket keeps the old residual until the update is written: a copy only where it is too narrow.
            wide = piece.element_size() >= torch.float32.itemsize
            before = piece if wide else torch.empty_like(piece, dtype=torch.float32)
            self.reducer.add(piece, place.start, before, hold_back=unused)
            self._places.append(place)

    def _unused(self, pieces: list[Tensor]) -> list[bool]:
        """Parameters that may have been unused in the backward pass: their gradients are all zero."""
        if not self.layout.apart or not pieces:
            return [False] * len(pieces)
        used = ops.read(torch.stack([piece.any() for piece in pieces]))[0]
        return [not each for each in used.tolist()]

    def _mean_of_sparse(self, buffer: Tensor) -> Tensor:
        """The exact mean of a sparse embedding's gradient, which has few rows already and is not sparsified."""
        with during(f"step {self.reducer.step}"):
            total = self.world.run([metered(sparse_sum(buffer), self._beside, self.world.size)])[0]
        return total / self.world.size

    def _exchange(self) -> None:
        if self.check_every and self.reducer.step and self.reducer.step % self.check_every == 0:
            self.check_replicas()
        sent = self.world.run([self.reducer.finish()])[0]
        started = time.perf_counter()
        buckets, places = self._buckets, self._places
        self._buckets, self._places = [], []  # the step is complete, whatever happens to the update
        self.layout.write_(sent, places, [buffer for _, buffer in buckets])
        self.reducer.note_write(time.perf_counter() - started)
        self.report = self._with_beside()
        self.totals = self.totals.with_step(self.report)
        self.advice.note(self.report)
        for future, buffer in buckets:
            future.set_result(buffer)

    def _with_beside(self) -> StepReport:
        report, beside = self.reducer.report, self._beside.total
        assert report is not None
        return replace(
            report,
            bytes_sent=report.bytes_sent + beside.handed_bytes,
            ring_bytes=report.ring_bytes + beside.ring_bytes,
            collectives=report.collectives + beside.calls,
        )
