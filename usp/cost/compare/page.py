"""A comparison as one self-contained HTML page: tables, and plots as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from io import StringIO
from typing import Any

from usp.cost.grid import AND, Grid

STYLE = """
:root { color-scheme: light; --line: #d5d9e0; --quiet: #5b6472; --band: #f5f7fa; --ink: #1b2330; --link: #1f5fbf }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); margin: 0 auto; padding: 2rem; max-width: 90rem }
h1 { font-size: 1.6rem; margin: 0 0 .3rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem }
p { margin: .3rem 0; color: var(--quiet); max-width: 60rem }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .7rem; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top }
th { background: var(--band); white-space: nowrap } tr:last-child td { border-bottom: 0 }
tbody tr:hover { background: var(--band) } td:first-child { font-weight: 600; white-space: nowrap }
figure { margin: 0 } svg { width: 100%; height: auto }
"""


def page(title: str, facts: Sequence[str], tables: Sequence[Grid], figure: Any) -> str:
    """Return the page: the title, one line per fact, a matplotlib figure, and the tables."""
    drawn = StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :]  # the XML declaration is not valid inside an HTML body
    body = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(fact)}</p>" for fact in facts)]
    body += ["<h2>By number of devices and by sequence length</h2>", f"<figure>{svg}</figure>", *map(_table, tables)]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    head += f"<style>{STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{"".join(body)}</body></html>\n'


def _table(grid: Grid) -> str:
    heads = "".join(f"<th>{escape(column)}</th>" for column in grid.columns)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in grid.rows)
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>\n{rows}</tbody></table>"
    return f'<h2>{escape(grid.title)}</h2><div class="wide">{table}</div>\n'


def _cell(text: str) -> str:
    return f"<td>{escape(text).replace(AND, '<br>')}</td>"
