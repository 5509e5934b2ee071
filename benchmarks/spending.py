"""Other constants of the budget's rule: total error and metric against steady's, as density-control has them.

    GRADSIEVE_DATA=... python benchmarks/spending.py --case mlp --case ncf HEAD_START=1.5 RISE=0.05
    GRADSIEVE_DATA=... python benchmarks/spending.py --first 10
    GRADSIEVE_DATA=... python benchmarks/spending.py --steps 1920 --seeds 2

The others say how the rule as it is does with seeds or lengths on which it was not chosen. Constants are those of
`gradsieve.density.budget`. Runs of steady are kept in --out, those of the rule not.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from studies.reproduce import density_control
from studies.reproduce.density_control import BUDGET, CASES, STEADY
from studies.reproduce.shelf import Shelf

from gradsieve._check import at_least
from gradsieve.density import budget
from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.running import Stop
from gradsieve_lab.runs.settings import Settings


class Trials(Shelf):
    """A shelf that forgets what depends on the rule."""

    def run(self, settings: Settings) -> Run:
        if settings.spend != BUDGET:
            return super().run(settings)
        with TemporaryDirectory() as folder:
            return Shelf(Path(folder), self.quick, self.listen, self.stop).run(settings)


def change(constants: Sequence[str], refuse: Callable[[str], object]) -> None:
    for text in constants:
        name, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = None
        if number is None or not isinstance(getattr(budget, name, None), float):
            refuse(f"constant must be NAME=NUMBER with a name of {budget.__name__}, got {text}")
        setattr(budget, name, number)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("constants", nargs="*", metavar="NAME=NUMBER")
    arguments.add_argument("--case", action="append", choices=CASES, help="may be repeated; default: all")
    arguments.add_argument("--first", type=int, default=0, help="the first seed; default: 0")
    steps, seeds = density_control.FULL
    arguments.add_argument("--seeds", type=int, default=len(seeds), help="how many, at most; default: %(default)s")
    arguments.add_argument("--steps", type=int, default=steps, help="default: %(default)s")
    arguments.add_argument("--out", type=Path, default=Path("benchmarks/reproduction"))
    chosen = arguments.parse_args()
    change(chosen.constants, arguments.error)
    try:
        at_least("steps", chosen.steps, 1)
        at_least("seeds", chosen.seeds, 1)
    except ValueError as error:
        arguments.error(str(error))
    shelf = Trials(chosen.out, False, lambda progress: None, Stop())
    density_control.FULL = (chosen.steps, range(chosen.first, chosen.first + chosen.seeds))
    for name in chosen.case or CASES:
        case = CASES[name]
        CASES[name] = replace(case, grid=(), methods=(STEADY, BUDGET), seeds=chosen.first + case.seeds)
        _, _, *found = density_control.run(shelf, [name]).checks
        for check in found:
            sys.stdout.write(f"{check.criterion}: {check.found}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
