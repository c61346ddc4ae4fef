"""A report of which only some sections are measured anew: the others keep their text, date and node."""

from __future__ import annotations

import re

from .wrapping import items

LOSSES = "## Where compression loses"


def joined(former: str, new: str) -> str:
    """``former`` with every section of ``new`` in the place of the one with the same title.

    Args:
        former: a report in Markdown; sections begin with ``## ``.
        new: a report of some benchmarks.

    Returns:
        The sections of ``former`` in their order. One that only ``new`` has follows the last one of its kind (the same
        title up to the colon), else the section that it follows in ``new``. The list of losses keeps the lines of runs
        that ``new`` does not have.
    """
    old, fresh = _sections(former), _sections(new)
    if LOSSES in old and LOSSES in fresh:
        fresh[LOSSES] = _joined_losses(old[LOSSES], fresh[LOSSES])
    titles = list(old)
    for before, title in zip([None, *fresh], fresh, strict=False):
        if title not in titles:
            titles.insert(_place(titles, title, before), title)
    return "".join(fresh.get(title) or old[title] for title in titles).rstrip("\n") + "\n"


def _place(titles: list[str], title: str, before: str | None) -> int:
    """Where a title goes that is not among these."""
    alike = [number for number, one in enumerate(titles) if one.partition(":")[0] == title.partition(":")[0]]
    if alike:
        return alike[-1] + 1
    return titles.index(before) + 1 if before in titles else len(titles)


def _sections(text: str) -> dict[str, str]:
    """The sections by their first lines, each with one empty line at its end; the head is under an empty title."""
    head, *parts = re.split(r"(?m)^(?=## )", text)
    return {"": head, **{part.partition("\n")[0]: part.rstrip("\n") + "\n\n" for part in parts}}


def _joined_losses(former: str, new: str) -> str:
    fresh = items(new)
    runs = {_run(line) for line in fresh}
    kept = [line for line in items(former) if _run(line) not in runs]
    text = new.partition("\n- ")[0].rstrip("\n")
    return f"{text}\n\n" + "\n".join([*fresh, *kept]) + "\n\n"


def _run(line: str) -> str:
    """Which run a line of the losses is about."""
    return line.partition(", against ")[0]
