"""Parts of an HTML page: sortable tables, figures, sentences. All text is escaped here and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple


class Column(NamedTuple):
    """A column's heading, and what it means."""

    title: str
    meaning: str


class Cell(NamedTuple):
    """What a cell shows, and the value that it is sorted by and that a program can read: never a rounded one."""

    text: str
    value: float | str | None = None


def number_cell(value: float | None, digits: int, unit: str = "") -> Cell:
    """Return a number with so many decimals; a dash, sorted last, where it is undefined."""
    return Cell("-", None) if value is None else Cell(f"{value:.{digits}f}{unit}", value)


def text_cell(text: str) -> Cell:
    """Return a text that is sorted as it reads."""
    return Cell(text, text)


def table(name: str, caption: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table whose columns can be sorted; the first column names the row.

    Args:
        name: a word that no other table of the page has.
    """
    heads = "".join(_head(column, [row[index] for row in rows]) for index, column in enumerate(columns))
    lines = "".join(f"<tr>{''.join(_cell(cell, index) for index, cell in enumerate(row))}</tr>" for row in rows)
    meanings = "".join(
        f"<dt>{escape(column.title)}</dt><dd>{escape(column.meaning)}</dd>" for column in columns if column.meaning
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table id="{name}" class="sortable"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>"
        f"<details><summary>What the columns mean</summary><dl>{meanings}</dl></details>"
    )


def _head(column: Column, cells: Sequence[Cell]) -> str:
    kind = "" if any(isinstance(cell.value, str) for cell in cells) else ' class="number"'
    button = f'<button type="button">{escape(column.title)}</button>'
    return f'<th scope="col"{kind} title="{escape(column.meaning)}">{button}</th>'


def _cell(cell: Cell, index: int) -> str:
    value = "" if cell.value is None else escape(str(cell.value))
    if index == 0:
        return f'<th scope="row" data-value="{value}">{escape(cell.text)}</th>'
    kind = "" if isinstance(cell.value, str) else ' class="number"'
    return f'<td data-value="{value}"{kind}>{escape(cell.text)}</td>'


def figure(svg: str, title: str, description: str) -> str:
    """Return a chart with its caption."""
    return f"<figure><h3>{escape(title)}</h3>{svg}<figcaption>{escape(description)}</figcaption></figure>"


def items(sentences: Sequence[str], kind: str) -> str:
    """Return sentences as a list, nothing if there are none."""
    if not sentences:
        return ""
    return f'<ul class="{kind}">{"".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)}</ul>'


def section(title: str, *parts: str) -> str:
    """Return parts under a heading."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def embedded(name: str, document: Mapping[str, Any]) -> str:
    """Return a document as JSON inside the page, where a program can read it back."""
    text = json.dumps(document, allow_nan=False, ensure_ascii=False)
    for sign in "<>&":  # no text in it can end the element
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'
