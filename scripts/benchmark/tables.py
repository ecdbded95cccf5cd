"""Tables for the terminal and for Markdown. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table

NONE = "-"


@dataclass
class TextTable:
    """Rows of text below a header; all columns except the first hold numbers."""

    title: str
    header: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def markdown(self) -> str:
        """Return the table as Markdown."""
        rule = ["---", *["---:"] * (len(self.header) - 1)]
        lines = [_line(row) for row in (self.header, rule, *self.rows)]
        return "\n".join([f"## {self.title}", "", *lines]) + "\n"

    def rich(self) -> Table:
        """Return the table for a terminal."""
        table = Table(title=self.title, title_justify="left", title_style="bold")
        for column, name in enumerate(self.header):
            table.add_column(name, justify="right" if column else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def times(ratio: float | None) -> str:
    """Format a ratio, such as 1.25."""
    return NONE if ratio is None else f"{ratio:.2f}"


def mib(num_bytes: float | None) -> str:
    """Format bytes in MiB."""
    return NONE if num_bytes is None else f"{num_bytes / 2**20:,.0f}"
