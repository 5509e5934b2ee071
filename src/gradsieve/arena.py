"""One worker's residual, and the pieces of a gradient that were added to it in the step under way."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.comm.step import Span
from gradsieve.sparsifiers.base import Window, hits_in


@dataclass(frozen=True)
class Piece:
    """A part of the gradient that was added to the residual in this step."""

    start: int
    stop: int
    before: Tensor  # the residual as it was
    version: int  # torch's count of writes to `before`, after this one
    held_back: bool  # nothing of it may be sent
    hits: Tensor


class Arena:
    """The residual, which can always be put back to what it was before the step."""

    def __init__(self, n: int, device: torch.device) -> None:
        self.residual = torch.zeros(n, dtype=torch.float32, device=device)
        self.limit = math.inf  # the largest magnitude that gradients can hold
        self._excess: tuple[Tensor, Tensor] | None = None  # positions, and by how much they are beyond the limit
        self.pieces: list[Piece] = []
        self._finite = torch.tensor(True, device=device)

    def begin(self) -> None:
        """A step begins."""
        self.pieces = []
        self._finite = torch.tensor(True, device=self.residual.device)

    def add(self, added: Tensor, start: int, before: Tensor, window: Window, *, held_back: bool) -> None:
        """`residual[start:][:len(added)] += added`; `before` receives the residual as it was, and must stay."""
        stop = start + len(added)
        first, last = (start, start) if held_back or not added.is_cpu else (window.start, window.stop)
        inside = (min(max(edge - start, 0), len(added)) for edge in (first, last))
        hits = ops.accumulate_select_(
            self.residual[start:stop], added, window.threshold, *inside, backup=before, finite=self._finite
        )
        hits = hits + start if start else hits
        self.pieces.append(Piece(start, stop, before, before._version, held_back, hits))

    @property
    def finite(self) -> Tensor:
        """Whether all that was added is."""
        return self._finite

    def hits(self, window: Window, *, needed: bool) -> Tensor:
        """What is in the window, rising: found in the accumulating pass on a CPU.

        On other devices the host would wait in every piece to learn how much that is. So there they are looked for
        in the end, and only if they are needed.
        """
        if not self.residual.is_cpu:
            return hits_in(self.residual, window, needed=needed)
        return torch.cat([piece.hits for piece in sorted(self.pieces, key=lambda piece: piece.start)])

    @property
    def held_back(self) -> Sequence[Span]:
        return [(piece.start, piece.stop) for piece in self.pieces if piece.held_back]

    @contextmanager
    def exchange(self) -> Iterator[Tensor]:
        """The accumulator, without what is held back or beyond the limit, which is there again afterwards.

        An error in between takes the whole step back.
        """
        kept = [(span, self.residual[slice(*span)].clone()) for span in self.held_back]
        try:
            for span, _ in kept:
                self.residual[slice(*span)] = 0
            self._hold_excess()
            yield self.residual
        except BaseException:
            self.restore()
            raise
        for span, values in kept:
            self.residual[slice(*span)] = values
        if self._excess is not None:
            self.residual[self._excess[0]] += self._excess[1]
        self.pieces = []

    def _hold_excess(self) -> None:
        self._excess = None
        if self.limit < math.inf:
            positions = ops.select_above(self.residual, self.limit)
            values = self.residual[positions]
            self.residual[positions] = values.clamp(-self.limit, self.limit)
            self._excess = positions, values - self.residual[positions]

    def restore(self) -> None:
        """Take back all that was added."""
        self._excess = None
        for piece in self.pieces:
            self.residual[piece.start : piece.stop] = piece.before

    def release(self) -> None:
        """Leave the residual's memory to whoever uses it, and begin with zeros elsewhere."""
        self.residual = torch.zeros_like(self.residual)

    def abandon(self) -> None:
        """Take back the pieces of a step that cannot be finished.

        Where their `before` was written to since, what was added stays in the residual: nothing is lost.
        """
        self.pieces = [piece for piece in self.pieces if piece.before._version == piece.version]
        self.restore()
        self.pieces = []
