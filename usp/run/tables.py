"""A table of text that the reports share: for the terminal, in Markdown, and as data for HTML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.table import Table

AND = " + "  # between the parts of a cell
GIB = 2**30
_WORD = 20  # characters of a word that a column has room for


@dataclass(frozen=True)
class Grid:
    """A table: column titles and rows of text. The parts of a cell are joined by `AND`; the terminal stacks them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        title = f"{self.title}\n\n" if self.title else ""
        return title + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def table(self) -> Table:
        """Return the table for rich, numbers aligned to the right."""
        table = Table(
            title=self.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
        )
        for column, *cells in zip(self.columns, *self.rows, strict=True):
            numbers = all(cell.replace(".", "").replace(",", "").isdigit() for cell in cells if cell)
            longest = max((len(word) for cell in (column, *cells) for word in cell.split()), default=0)
            width = min(longest, _WORD)
            justify: Literal["left", "right"] = "right" if numbers else "left"
            table.add_column(column, overflow="fold", justify=justify, min_width=width)
        for row in self.rows:
            table.add_row(*(cell.replace(AND, "\n") for cell in row))
        return table
