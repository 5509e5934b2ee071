"""The live table of several runs, with a progress bar for each."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from gradsieve_lab.cli.common import table
from gradsieve_lab.cli.live import LOGGED, clock, show, started
from gradsieve_lab.report.table import duration, size
from gradsieve_lab.runs.running import Listen
from gradsieve_lab.runs.training import Progress, Starting
from gradsieve_lab.tasks.base import Metric

_BAR = 22  # columns


@dataclass
class Row:
    """The progress of one run so far."""

    label: str
    since: float = 0.0  # when its workers were started; 0: not yet
    news: Progress | None = None


class Dashboard:
    """The table of all runs of one task, which run one after the other."""

    def __init__(self, title: str, metric: Metric, labels: Sequence[str]) -> None:
        self.title, self.metric = title, metric
        self.rows = {label: Row(label) for label in labels}

    def listen(self, news: Progress | Starting) -> None:
        row = self.rows[news.label]
        if isinstance(news, Starting):
            row.since = time.monotonic()
        else:
            row.news = news

    def __rich__(self) -> Table:
        made = table(self.title, ["method", ""], ["steps", self.metric.name, "sent", "time/\nstep", "time"])
        for row in self.rows.values():
            made.add_row(row.label, *self._cells(row))
        return made

    def _cells(self, row: Row) -> list[ProgressBar | str]:
        news = row.news
        if news is None:
            waits = f"starting {clock(time.monotonic() - row.since)}" if row.since else ""
            return [waits, "", "", "", "", ""]
        bar = ProgressBar(total=1.0, completed=news.fraction, width=_BAR)
        value = "" if news.metric is None else self.metric.show(news.metric)
        per_step = duration(news.seconds / news.step) if news.step else ""
        return [bar, f"{news.step:,}", value, size(news.bytes), per_step, clock(news.seconds)]


@contextmanager
def dashboard(title: str, metric: Metric, labels: Sequence[str], *, hidden: bool) -> Iterator[Listen]:
    """Show a live table, which stays at the end; in a log, a line when a run starts and one when it ends."""
    screen = Console(stderr=True)
    if hidden:
        yield lambda news: None
    elif screen.is_terminal:
        board = Dashboard(title, metric, labels)
        with Live(board, console=Console(stderr=True, width=min(80, screen.width)), refresh_per_second=4):
            yield board.listen
    else:

        def log(news: Progress | Starting) -> None:
            if isinstance(news, Starting):
                screen.print(f"{news.label}: {started(news)}", highlight=False, soft_wrap=True)
            elif news.over:
                screen.print(show(news, metric, LOGGED), highlight=False, soft_wrap=True)

        screen.print(title, highlight=False, soft_wrap=True)
        yield log
