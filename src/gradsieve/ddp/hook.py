"""The communication hook: DDP calls it bucket by bucket, as gradients become ready.

Each bucket is added to the residual at once, which overlaps with the rest of the backward pass. When the last one
is in, one exchange for the whole model follows, updates are written into the buckets in place, and the
futures of all buckets complete.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve._check import BadType
from gradsieve.comm.exchange import sparse_sum
from gradsieve.comm.traffic import Ledger, metered
from gradsieve.ddp.advice import NoAdvice
from gradsieve.ddp.layout import Layout, Place
from gradsieve.reducer import SparseReducer
from gradsieve.reports import StepReport
from gradsieve.state.replicas import check_replicas
from gradsieve.worlds import World


class BucketHook:
    """One backward pass after the other; `report` is the last one's."""

    part = ""  # of a checkpoint's folder: all ranks share it

    def __init__(
        self,
        reducer: SparseReducer,
        layout: Layout,
        world: World,
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
        self._buckets: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        self._places: list[Place] = []
        self._beside = Ledger()  # this step's traffic outside the reducer

    def on_bucket(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        if not isinstance(bucket, dist.GradBucket):  # type: ignore[attr-defined]
            raise BadType(
                "the hook must be called by DDP's own reducer, got a call of torch._dynamo's python_reducer: "
                'set torch._dynamo.config.optimize_ddp to "ddp_optimizer"'
            )
        if bucket.index() == 0:
            self._begin()
        buffer = bucket.buffer()
        devices: list[int | str | torch.device] = [buffer.device] if buffer.device.type == "cuda" else []
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        try:
            if buffer.is_sparse:
                buffer = self._mean_of_sparse(buffer)
            else:
                self._add(bucket, buffer)
            self._buckets.append((future, buffer))
            if bucket.is_last():
                self._exchange()
        except BaseException:
            self._drop()
            raise
        return future

    def drop_unfinished(self, *called_with: Any) -> None:
        """Forget a backward pass that raised an error before all gradients were ready."""
        if self._buckets:
            self._drop()

    def check_replicas(self) -> None:
        """Compare all workers' parameters."""
        self.world.run([check_replicas(self.parameters, self.reducer.step)])

    def _drop(self) -> None:
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
        for place in self.layout.places(bucket.parameters(), len(self._buckets)):
            piece = place.within(buffer)
            # The bucket keeps the old residual until the update is written: a copy only where it is too narrow.
            wide = piece.element_size() >= torch.float32.itemsize
            before = piece if wide else torch.empty_like(piece, dtype=torch.float32)
            self.reducer.add(piece, place.start, before, hold_back=self.layout.apart and not piece.any())
            self._places.append(place)

    def _mean_of_sparse(self, buffer: Tensor) -> Tensor:
        """Gradients of sparse embeddings are few rows already: summed exactly, outside the sieve."""
        return self.world.run([metered(sparse_sum(buffer), self._beside, self.world.size)])[0] / self.world.size

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
