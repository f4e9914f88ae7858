"""Markdown tables of the documents."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> list[str]:
    """The lines of a table; the first ``words`` columns are text, the others numbers.

    Columns of numbers that are empty in every row are left out.
    """
    used = [column for column in range(len(head)) if column < words or any(row[column] for row in rows)]
    rule = "|" + "---|" * words + "---:|" * (len(used) - words)
    lines = ["| " + " | ".join(row[column] for column in used) + " |" for row in (head, *rows)]
    return [lines[0], rule, *lines[1:]]
