"""How the command line speaks: data on stdout, words on stderr, numbers a person can read, exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import IO, Any

import click
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from memstore.core.cluster.text import age_text as age_text
from memstore.core.cluster.text import plural as plural
from memstore.core.cluster.text import size_text as size_text

STORE_CONFIG = "memstore.config"  # where click's context keeps the Config that --store and --arena-dir make
DATA_STREAM = "memstore.data-stream"  # where it keeps the process's stdout once sys.stdout is not for data any more
GAP = 2  # spaces between columns
PLAIN_COLUMNS = 1 << 16  # width of what goes to a file or a pipe: every row and every problem is one line


class ExitCode(IntEnum):
    """What the process's exit code says; 2 is click's, for wrong usage."""

    FINE = 0
    ERROR = 1
    USAGE = 2
    UNRECOVERABLE = 3
    DEGRADED = 4
    STOPPED = 5
    INTERRUPTED = 130  # as shells say it of Ctrl-C


def data_stream() -> IO[str]:
    """Return stdout, also while what else is printed there goes to stderr."""
    context = click.get_current_context(silent=True)
    return (context.find_root().meta.get(DATA_STREAM) if context is not None else None) or sys.stdout


def data_console() -> Console:
    """Return a console on stdout as it is now."""
    stdout = data_stream()
    width = None if stdout.isatty() or "COLUMNS" in os.environ else PLAIN_COLUMNS
    return Console(file=stdout, width=width, highlight=False, markup=False, emoji=False)


def words_console() -> Console:
    """Return a console on stderr as it is now."""
    return Console(file=sys.stderr, highlight=False, markup=False, emoji=False)


def say(text: str) -> None:
    """Write words, not data; the commands in them name the store that the verb was asked about."""
    click.echo(for_this_store(text), err=True)


def for_this_store(text: str) -> str:
    """Return `text` with the verb's store named in the `memstore` commands that it names."""
    context = click.get_current_context(silent=True)
    config = context.find_root().meta.get(STORE_CONFIG) if context is not None else None
    return text if config is None else str(config.commands(text))


def print_json(body: Any) -> None:
    """Write one JSON document to stdout, on one line."""
    click.echo(json.dumps(body, ensure_ascii=False, default=str), file=data_stream())


class PlainTable(Table):
    """A table without lines that breaks no word: where it would have to, each row is a name above its cells."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Give each column at least its longest word; print rows of named cells if that does not fit."""
        cells = [[str(cell) for cell in column.cells] for column in self.columns]
        texts = [[str(column.header), *column_cells] for column, column_cells in zip(self.columns, cells, strict=True)]
        least = [max((cell_len(word) for text in column for word in text.split()), default=0) for column in texts]
        most = [max(map(cell_len, column)) for column in texts]
        spare = options.max_width - sum(least) - GAP * (len(least) - 1)
        if spare >= 0:
            by_wish = sorted(range(len(least)), key=lambda at: most[at] - least[at])
            for place, at in enumerate(by_wish):  # the columns that wish for least get all of it
                more = min(most[at] - least[at], spare // (len(least) - place))
                self.columns[at].width, spare = least[at] + more, spare - more
            yield from super().__rich_console__(console, options)
            return
        names = [str(column.header) for column in self.columns]
        first = 1 if names[0] else 2  # a column without a header is drawn before the name
        for row in zip(*cells, strict=True):
            yield Text(" ".join(row[:first]).strip(), style="bold")
            lines = [""]
            for name, cell in zip(names[first:], row[first:], strict=True):
                line = f"{lines[-1]}{' ' * GAP}{name}: {cell}".lstrip()
                if cell in ("", "-"):
                    continue
                if cell_len(line) <= options.max_width - GAP:
                    lines[-1] = line
                else:
                    lines.append(f"{name}: {cell}")
            yield from (Padding(Text(line), (0, 0, 0, GAP), expand=False) for line in lines if line)


def plain_table(*headers: str) -> PlainTable:
    """Return a table without lines; a header that starts with ">" aligns right."""
    table = PlainTable(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    for header in headers:
        table.add_column(header.lstrip(">"), justify="right" if header.startswith(">") else "left", overflow="fold")
    return table


def count_text(value: int | None) -> str:
    """Return "18,412", or "-" for None."""
    return "-" if value is None else f"{value:,}"


@contextlib.contextmanager
def progress_bar(words: str, total: int | None = None, unit: str = "") -> Iterator[Callable[..., None]]:
    """Draw a bar on stderr, on a terminal alone, until what it is for ends or fails.

    Args:
        words: What is done; a name in it may leave no place for the count.
        total: How much there is to do; None while that is not known.
        unit: What is counted, such as "hosts"; bytes are by default.

    Yields: what takes how much more is done; or, by name, how much is `done` in all, and the `total`.
    """
    console = words_console()
    count = (MofNCompleteColumn(), TextColumn(unit)) if unit else (DownloadColumn(binary_units=True),)
    columns = (TextColumn("{task.description}"), BarColumn(20), *count, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(words, total=total)

        def tell(more: int = 0, *, done: int | None = None, total: int | None = None) -> None:
            bar.update(task, advance=more, completed=done, total=total)

        yield tell
