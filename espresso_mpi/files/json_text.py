"""What a JSON text may not hold although a decoder takes it.

Decoders keep the last of two equal keys without a word, end in Python's recursion limit where lists nest deeply, and
make numbers that fit into no array. All of that is refused here, with its place, before the text is decoded.

A text is read token by token, in Python. Large ones are first looked over by a compiled scan, which is some fifty times
quicker: what it finds harmless is harmless; about the rest the tokens decide.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from ..errors import ConfigError

DEEPEST = 64
"""Levels of nesting. What this package writes has ten; each costs a decoder a part of the stack, which ends at some
thousands."""

_AT_ONCE = 1 << 18
"""Bytes of a text that are read token by token right away: in less time than the compiled scan takes to load."""

_INT64 = range(-(1 << 63), 1 << 63)
_LONGEST = len(str(1 << 63)) + 1
"""Characters of the longest number of 64 bits, with its sign."""

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}:,]|[^\s"\[\]{}:,]+', re.DOTALL)
_NUMBER = re.compile(rb"-?[0-9]")
_WHOLE = re.compile(rb"-?[0-9]+")
_NOT_FINITE = (b"NaN", b"Infinity", b"-Infinity")

_STEPS = 8
"""Keys and indices on the way to a place that are shown."""


def refuse(data: bytes) -> None:
    """Refuse a text with duplicate keys, deep nesting, or numbers that are not finite or beyond 64 bits.

    Text that is no JSON passes: that is for the decoder to say.

    Raises:
        ConfigError: naming the place, what stands there and what was expected.
    """
    if len(data) > _AT_ONCE:
        from .json_scan import harmless  # compiled: it takes a while to load

        if harmless(data, DEEPEST):
            return
    _Reader(data).read()


@dataclass
class _Open:
    """An object or list whose end has not come.

    Attributes:
        at: the last key of an object, the index in a list.
        keys: of an object, so far; key_next: it goes on with a key.
    """

    is_object: bool
    key_next: bool
    at: bytes | int | None
    keys: set[bytes] = field(default_factory=set)


class _Reader:
    """Reads one text."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.open: list[_Open] = []

    def read(self) -> None:
        """See ``refuse``."""
        for match in _TOKEN.finditer(self.data):
            token, self.position = match[0], match.start()
            if token in b"{[":
                self._enter(token == b"{")
            elif token in b"}]":
                if self.open:
                    self.open.pop()
            elif token == b",":
                self._next()
            elif token[:1] == b'"':
                if self.open and self.open[-1].key_next:
                    self._key(token)
            elif _NUMBER.match(token) or token in _NOT_FINITE:
                self._number(token)

    def _enter(self, is_object: bool) -> None:
        self.open.append(_Open(is_object, is_object, None if is_object else 0))
        if len(self.open) > DEEPEST:
            raise self._error(f"lists and objects nest more than {DEEPEST} deep; expected no more levels than that")

    def _next(self) -> None:
        if self.open:
            inner = self.open[-1]
            inner.key_next = inner.is_object
            if isinstance(inner.at, int):
                inner.at += 1

    def _key(self, token: bytes) -> None:
        inner, key = self.open[-1], _text(token)
        inner.at, inner.key_next = key, False
        if key in inner.keys:
            raise self._error("the key stands twice in its object; expected each key once: remove one of the two")
        inner.keys.add(key)

    def _number(self, token: bytes) -> None:
        if token in _NOT_FINITE:
            raise self._error(f"got {token.decode()}; expected a finite number: JSON has no others")
        if _WHOLE.fullmatch(token):
            if len(token) > _LONGEST or int(token) not in _INT64:
                raise self._error(f"got {_short(token)}; expected a whole number of 64 bits, less than {1 << 63}")
        elif _infinite(token):
            raise self._error(f"got {_short(token)}; expected a finite number, which float64 holds up to 1.8e308")

    def _error(self, said: str) -> ConfigError:
        on_the_way = [one.at for one in self.open if one.at is not None]
        steps = [f": {_short(at)}" if isinstance(at, bytes) else f"[{at}]" for at in on_the_way[:_STEPS]]
        place = "".join(steps).removeprefix(": ") + (" ..." if len(on_the_way) > _STEPS else "")
        line = self.data.count(b"\n", 0, self.position) + 1
        return ConfigError(f"line {line}: {place}{': ' if place else ''}{said}")


def _text(token: bytes) -> bytes:
    """What a string's token says, so that all ways to write a key are one."""
    if b"\\" not in token:
        return token[1:-1]
    try:
        return str(json.loads(token)).encode("utf-8", "surrogatepass")
    except ValueError:  # no JSON: the decoder says so
        return token


def _infinite(token: bytes) -> bool:
    try:
        return abs(float(token)) == float("inf")
    except ValueError:  # no JSON: the decoder says so
        return False


def _short(text: bytes) -> str:
    said = "".join(char if char.isprintable() else " " for char in text[:200].decode("utf-8", "replace"))
    return said if len(text) <= 40 else f"{said[:30]}... ({len(text)} bytes)"
