"""One worker's residual, and the pieces of a gradient that were added to it in the current step."""

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
    """A part of the gradient that was added to the residual in the current step."""

    start: int
    stop: int
    before: Tensor  # the residual as it was
    version: int  # torch's count of writes to `before`, after this one
    held_back: bool  # nothing of it may be sent
    hits: Tensor


class Arena:
    """The residual, which can be restored at any time to what it was before the step."""

    def __init__(self, n: int, device: torch.device) -> None:
        self.residual = torch.zeros(n, dtype=torch.float32, device=device)
        self.limit = math.inf  # the largest magnitude that gradients can hold
        self._excess: tuple[Tensor, Tensor] | None = None  # positions, and by how much they are beyond the limit
        self.pieces: list[Piece] = []
        self._finite = torch.tensor(True, device=device)

    def begin(self) -> None:
        """Begin a step."""
        self.pieces = []
        self._finite = torch.tensor(True, device=self.residual.device)

    def add(self, added: Tensor, start: int, before: Tensor, window: Window, *, held_back: bool) -> None:
        """`residual[start:][:len(added)] += added`; `before` receives the residual as it was."""
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
        """Whether all sums are finite, as a tensor."""
        return self._finite

    def hits(self, window: Window, *, needed: bool) -> Tensor:
        """The positions in the window, in rising order. On a CPU the accumulating pass has found them.

        On other devices the host would have to wait for their number in every piece. There the search is made at
        the end, and only if hits are needed.
        """
        if not self.residual.is_cpu:
            return hits_in(self.residual, window, needed=needed)
        return torch.cat([piece.hits for piece in sorted(self.pieces, key=lambda piece: piece.start)])

    @property
    def held_back(self) -> Sequence[Span]:
        return [(piece.start, piece.stop) for piece in self.pieces if piece.held_back]

    @contextmanager
    def exchange(self) -> Iterator[Tensor]:
        """The accumulator without what is held back or beyond the limit; both are added back afterwards.

        An error inside the block undoes the whole step.
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
        """Undo all that was added."""
        self._excess = None
        for piece in self.pieces:
            self.residual[piece.start : piece.stop] = piece.before

    def release(self) -> None:
        """Replace the residual by zeros in new memory, if its own memory is used for something else."""
        self.residual = torch.zeros_like(self.residual)

    def abandon(self) -> None:
        """Undo the pieces of a step that cannot be finished.

        If the `before` of a piece has been overwritten since, what was added stays in the residual: nothing is
        lost.
        """
        self.pieces = [piece for piece in self.pieces if piece.before._version == piece.version]
        self.restore()
        self.pieces = []
