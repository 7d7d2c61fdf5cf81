"""Where the commands print, and how they show that they are at work."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table


def wide_console() -> Console:
    """Standard output; wide enough for the tables where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 140))


def error_console() -> Console:
    """Standard error."""
    return Console(stderr=True)


def progress() -> Progress:
    """On standard error, and gone when it is done."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=error_console(), transient=True)


def number_table(title: str, first: str, rest: tuple[str, ...]) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for name in rest:
        table.add_column(name, justify="right", no_wrap=True)
    return table
