"""What a plan depends on, and how it differs from what is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def difference(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str] = ("there", "here")) -> list[str]:
    """What differs between two fingerprints, one line an entry; empty if they agree.

    Args:
        names: what the two are called, such as ("the plan", "this job").
    """
    lines = []
    for key in sorted({*a, *b}):
        left, right = a.get(key, _ABSENT), b.get(key, _ABSENT)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            lines += [f"{key}.{line}" for line in difference(left, right, names)]
        elif left != right:
            lines.append(f"{key}: {_word(left)} ({names[0]}), {_word(right)} ({names[1]})")
    return lines


_ABSENT = object()


def _word(value: Any) -> str:
    return "not said" if value is _ABSENT else str(value)
