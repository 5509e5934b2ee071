"""ExDyna: exclusive partitions whose borders follow the load, and one threshold for all workers.

Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning",
CCGrid 2024.

One step of one worker:

1. `sparsifier.py`: `ExDyna.window` returns what to look for while the gradient is accumulated: this worker's own
   partition, which rotates with the step, and the *cut*, a magnitude somewhat below the last threshold.
2. The accumulating pass (`ops.accumulate_select_`) returns the *hits*: positions in the partition above the cut.
3. `threshold.py`: the workers exchange small histograms of their hits (`sparsifiers/histograms.py`). From these all
   workers compute the same threshold, and how many elements each of them sends: k in total, in every step.
4. Positions are gathered and values summed (`comm/exchange.py`); partitions are exclusive, so no position is sent
   twice and nothing has to be merged.
5. `partition.py`: `ExDyna.update` counts per block what was sent, and moves the borders between partitions if
   loads are uneven.

The paper scales its threshold by small factors from step to step. This one is computed from histograms of the same
step, so the density is exact from the first step on, whatever gradients do. `studies` has the authors' released
rules for comparison.
"""

from gradsieve.sparsifiers.exdyna.sparsifier import Exclusive, ExDyna

__all__ = ["ExDyna", "Exclusive"]
