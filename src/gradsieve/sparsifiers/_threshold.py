"""How a threshold that all workers share finds and keeps the asked density."""

from torch import Tensor

from gradsieve import ops

GAIN = 0.15  # how much of an error in the logarithm of the count is corrected in the logarithm of the threshold
TRUST = 1.5  # beyond this factor the threshold is not corrected but measured anew


def calibrate(histogram: Tensor, k: int) -> float | None:
    """The bin edge above which the number of magnitudes is nearest to k, as a ratio, but not none.

    `histogram` is `ops.log_histogram` summed over all workers' spans. None if nothing is above the lowest bin,
    which holds zeros and what is too small to matter.
    """
    above = histogram.flip(0).cumsum(0).flip(0)  # above[i]: how many magnitudes are >= bin_edge(i)
    if above[1] == 0:
        return None
    enough = max(int((above >= k).sum()) - 1, 1)
    more = int(above[enough])
    fewer = int(above[enough + 1]) if enough + 1 < len(above) else 0
    return ops.bin_edge(enough + 1 if fewer and k / fewer < more / k else enough)


def follow(threshold: float, selected: int, k: int) -> float | None:
    """The next step's threshold after one that selected `selected` of k; None: measure it anew."""
    ratio = selected / k
    if not 1 / TRUST <= ratio <= TRUST:
        return None
    return float(threshold * ratio**GAIN)
