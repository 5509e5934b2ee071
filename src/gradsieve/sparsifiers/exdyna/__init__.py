"""ExDyna: exclusive partitions whose borders follow the work, and one threshold for all workers.

Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning",
CCGrid 2024.

One step of one worker:

1. `sparsifier.py`: `ExDyna.window` says what to look for while the gradient is accumulated: this worker's own
   partition, rotating with the step, and the *cut*, a magnitude somewhat below the last threshold.
2. The accumulating pass (`ops.accumulate_select_`) returns the *hits*: positions in the partition above the cut.
3. `threshold.py`: the workers exchange small histograms of their hits (`sparsifiers/histograms.py`). From these,
   all read the same threshold and how many elements each of them sends: k together, in every step.
4. Positions are gathered and values summed (`comm/exchange.py`); partitions are exclusive, so no position is sent
   twice and nothing has to be merged.
5. `partition.py`: `ExDyna.update` counts what was sent per block, and moves the borders between partitions where
   loads are uneven.

In place of the paper's threshold, which is scaled by small factors from step to step, this one is read off the
histograms of the same step: the density is exact from the first step on, whatever gradients do. `studies` has the
released rules for comparison.
"""

from gradsieve.sparsifiers.exdyna.sparsifier import Exclusive, ExDyna

__all__ = ["ExDyna", "Exclusive"]
