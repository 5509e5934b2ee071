"""The small GPT with AdamW at densities a user can choose from: 91,000 parameters, 4 virtual workers, 3,000 steps.

    GRADSIEVE_DATA=... python benchmarks/gpt.py [--method dense --method alone ...] [--out benchmarks/data/gpt.csv]

A run takes two to four minutes on one core. `benchmarks/tables.py` makes the tables of docs/share.md; `trials.py`
says how runs are chosen and kept.
"""

from pathlib import Path

from trials import Trials, compare

from gradsieve_lab.runs.settings import Settings

STEPS = 3000
BEST = "share:noise=averaged:values=fp8"
METHODS = {
    name: name
    for name in (
        "dense",
        "alone",
        f"{BEST}:density=0.027",  # the bytes of a density of 0.01 with fp32 values
        f"{BEST}:density=0.27",
        "share:density=0.01",
        "average:every=77",  # its bytes
        "shared_threshold:density=0.01",
        f"{BEST}:density=0.0027",
        f"{BEST}:density=1",
        "share:density=0.1",
        "average:every=8",  # its bytes
        "share:values=fp8:density=0.027",
        f"{BEST}:density=0.027:delay=1",
        "share:density=0.001",
        "exdyna:density=0.01",
        # Local steps: a fifth of those bytes, and averages at equal and at ten times these.
        f"{BEST}:density=0.04:every=8",
        f"{BEST}:density=0.1:every=20",
        f"{BEST}:density=0.25:every=50",
        "average:every=480",
        "average:every=48",
    )
}
TRIALS = Trials(
    tasks=("gpt",),
    common=Settings(
        "gpt",
        dataset="tiny_shakespeare",
        virtual=True,
        width=0.5,
        batch=8,
        workers=4,
        steps=STEPS,
        eval_every=STEPS,
        density=0.01,
        save=False,
    ),
    methods=METHODS,
    rates=(0.006, 0.009, 0.004),
    special_rates={},
)


if __name__ == "__main__":
    compare(TRIALS, Path("benchmarks/data/gpt.csv"), __doc__)
