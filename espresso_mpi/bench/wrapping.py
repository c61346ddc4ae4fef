"""The width of a report: no line of prose is longer than 120 characters."""

from __future__ import annotations

import textwrap

WIDTH = 120
_NOT_PROSE = ("|", "![", "    ")


def wrapped(text: str) -> str:
    """A text in Markdown whose long lines of prose are broken; tables, pictures and code keep their lines."""
    lines, code = [], False
    for line in text.split("\n"):
        code ^= line.startswith("```")
        if code or len(line) <= WIDTH or line.startswith(_NOT_PROSE):
            lines.append(line)
        else:
            indent = "  " if line.startswith("- ") else ""
            lines += textwrap.wrap(
                line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
    return "\n".join(lines)


def items(text: str) -> list[str]:
    """The items of the lists of a text, each as one line.

    Example:
        >>> from espresso_mpi.bench.wrapping import items
        >>> items("Text:\\n\\n- one,\\n  still one\\n- two\\n")
        ['- one, still one', '- two']
    """
    found: list[str] = []
    for line in text.splitlines():
        if line.startswith("- "):
            found.append(line)
        elif found and line.startswith("  "):
            found[-1] += f" {line.strip()}"
    return found
