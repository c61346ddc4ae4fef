"""A compiled scan of JSON texts; see ``json_text``."""

from __future__ import annotations

import numpy as np

from .compiled import compiled

_QUOTE, _ESCAPE, _COMMA, _COLON, _MINUS, _PLUS, _DOT = (np.uint8(ord(one)) for one in '"\\,:-+.')
_OPEN_OBJECT, _SHUT_OBJECT, _OPEN_LIST, _SHUT_LIST = (np.uint8(ord(one)) for one in "{}[]")
_ZERO, _NINE, _SMALL_E, _LARGE_E = (np.uint8(ord(one)) for one in "09eE")
_N, _I = np.uint8(ord("N")), np.uint8(ord("I"))  # of NaN and Infinity

_DIGITS, _EXPONENT = 18, 2
"""Digits before the point, and of the exponent, with which every number is far inside of int64 and float64."""


def harmless(data: bytes, deepest: int) -> bool:
    """Whether a JSON text holds nothing that ``json_text.refuse`` refuses; False also where that is only likely."""
    return bool(_harmless(np.frombuffer(data, np.uint8), deepest))


@compiled
def _harmless(text, deepest):  # type: ignore[no-untyped-def]
    is_object, first = np.zeros(deepest + 1, np.bool_), np.zeros(deepest + 1, np.int64)
    keys, known = np.empty(1024, np.uint64), 0  # hashes of the keys of all objects that are open, by depth
    depth, key_next, at = 0, False, 0
    while at < text.size:
        char = text[at]
        at += 1
        if char == _QUOTE:
            begin, escaped = at, False
            while at < text.size and text[at] != _QUOTE:
                if text[at] == _ESCAPE:
                    escaped = True
                    at += 1
                at += 1
            if key_next:
                if escaped:  # one key may be written in several ways
                    return False
                if known == keys.size:
                    more = np.empty(2 * known, np.uint64)
                    more[:known] = keys
                    keys = more
                keys[known] = _hashed(text, begin, min(at, text.size))
                known += 1
                key_next = False
            at += 1
        elif char in (_OPEN_OBJECT, _OPEN_LIST):
            if depth == deepest:
                return False
            key_next = char == _OPEN_OBJECT
            is_object[depth], first[depth] = key_next, known
            depth += 1
        elif char in (_SHUT_OBJECT, _SHUT_LIST):
            if depth == 0:
                return False
            depth -= 1
            if not _different(keys[first[depth] : known]):
                return False
            known, key_next = first[depth], False
        elif char == _COMMA:
            key_next = depth > 0 and is_object[depth - 1]
        elif char in (_N, _I):
            return False
        elif char == _MINUS or _ZERO <= char <= _NINE:
            at = _after_number(text, at - 1)
            if at < 0:
                return False
    return depth == 0


@compiled
def _hashed(text, begin, end):  # type: ignore[no-untyped-def]
    """FNV-1a, 63 bits of it and a 1."""
    found = np.uint64(0xCBF29CE484222325)
    for place in range(begin, end):
        found = (found ^ np.uint64(text[place])) * np.uint64(0x100000001B3)
    return found | np.uint64(1)


@compiled
def _different(keys):  # type: ignore[no-untyped-def]
    """Whether no two are equal, by a hash table. Equal hashes of different keys are taken for equal keys."""
    size = 8
    while size < 2 * keys.size:
        size *= 2
    table = np.zeros(size, np.uint64)  # 0: nothing is there
    for key in keys:
        place = np.int64(key >> np.uint64(1)) & (size - 1)
        while table[place]:
            if table[place] == key:
                return False
            place = (place + 1) & (size - 1)
        table[place] = key
    return True


@compiled
def _after_digits(text, at):  # type: ignore[no-untyped-def]
    while at < text.size and _ZERO <= text[at] <= _NINE:
        at += 1
    return at


@compiled
def _after_number(text, at):  # type: ignore[no-untyped-def]
    """The place after a number; -1 if it may be too large."""
    if text[at] == _MINUS:
        at += 1
    begin = at
    at = _after_digits(text, at)
    if at - begin > _DIGITS:
        return -1
    if at < text.size and text[at] == _DOT:
        at = _after_digits(text, at + 1)
    if at < text.size and (text[at] == _SMALL_E or text[at] == _LARGE_E):
        at += 1
        if at < text.size and (text[at] == _MINUS or text[at] == _PLUS):
            at += 1
        begin = at
        at = _after_digits(text, at)
        if at - begin > _EXPONENT:
            return -1
    return at
