"""Who judges what is sent, where replicas stay identical: methods at about equal bytes, each with its best
learning rate, beside dense, the oracle and a worker alone.

    GRADSIEVE_DATA=... python benchmarks/judges.py [--task cnn --task mlp] [--out benchmarks/data/judges.csv]

`trials.py` says how runs are chosen and kept, `tables.py` makes the table of docs/judges.md, and
`studies/quality.py` tries what else an exclusive judge could know.
"""

from dataclasses import dataclass
from pathlib import Path

import studies.sparsifiers  # noqa: F401  # the oracle
import torch
from torch import Tensor
from trials import ALONE, DENSE, Trials, compare

from gradsieve import SPARSIFIERS
from gradsieve.extend import (
    Program,
    Selection,
    Sent,
    Sparsifier,
    State,
    Step,
    agreed,
    all_gather,
    gather_picks,
    largest,
)
from gradsieve.sparsifiers.shared_threshold import most_voted
from gradsieve_lab.runs.settings import Settings

WORKERS, STEPS, DENSITY = 8, 480, 0.001
# Times k: entries with a worker's own values that take as many bytes as k positions with everybody's; in so small a
# model histograms are a third of the bytes, and without them there are more.
OWN_VALUES, OWN_VALUES_HERE = 1.7, 2.6
FP8_HERE = 1.9  # times k: entries with eight-bit values that take the same bytes, histograms included
METHODS = {
    "shared_threshold": "shared_threshold",
    "exdyna": "exdyna",
    DENSE: "dense",
    "oracle (dense bytes)": "oracle",
    "own values, 1.7x as many": f"topk:aggregation=own:density={OWN_VALUES * DENSITY / WORKERS}",
    "votes with signs, 2k candidates": "votes",
    ALONE: "alone",
    "own values, 2.6x as many": f"topk:aggregation=own:density={OWN_VALUES_HERE * DENSITY / WORKERS}",
    # Weights: the agreed ones are evaluated, or the mean of all replicas, whose bytes count.
    "share": "share:finish=0",
    "share, fp8, 1.9x as many": f"share:finish=0:values=fp8:density={FP8_HERE * DENSITY}",
    "share, then one average of all": "share",
    "average": f"average:every={STEPS}",  # one average takes 1.1 times the bytes of all rounds of share
}


@dataclass(frozen=True)
class Votes(Sparsifier[State]):
    """Workers put forward 2k positions with signs; the k on whose direction most of them agree are sent."""

    def select(self, state: State, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        picked = largest(acc, max(1, 2 * step.k // step.world_size))
        counts = [len(picked)] * step.world_size
        shared, _ = yield from gather_picks(Selection(picked, counts), step)
        bits = torch.nn.functional.pad(acc[picked] > 0, (0, -len(picked) % 8)).view(-1, 8)
        packed = (bits * 2 ** torch.arange(8)).sum(1).to(torch.uint8)
        told = yield from all_gather("signs", packed, [len(packed)] * step.world_size)
        signs = [((part[:, None] >> torch.arange(8)) & 1).flatten()[: len(picked)] * 2 - 1 for part in told]
        indices, places = shared.unique(return_inverse=True)
        votes = torch.zeros(len(indices), dtype=torch.int64).index_add_(0, places, torch.cat(signs).long()).abs()
        return Selection(most_voted(indices, votes, step.k, step), counts)

    def exchange(self, acc: Tensor, selection: Selection, step: Step) -> Program[Sent]:
        return agreed(acc, selection, step)


TRIALS = Trials(
    tasks=("cnn", "mlp"),
    common=Settings(
        "cnn",
        dataset="mnist",
        virtual=True,
        workers=WORKERS,
        steps=STEPS,
        eval_every=STEPS,
        density=DENSITY,
        save=False,
    ),
    methods=METHODS,
    rates=(0.1, 0.05, 0.025),  # the recipes' for 8 workers, a half and a quarter of it
    special_rates={ALONE: (0.0125, 0.025, 0.05, 0.1)},  # from the recipes' for one worker on
)


if __name__ == "__main__":
    SPARSIFIERS["votes"] = Votes
    compare(TRIALS, Path("benchmarks/data/judges.csv"), __doc__)
