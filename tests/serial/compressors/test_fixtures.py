"""Payloads are what they were when ``make_fixtures.py`` stored them: ranks of different versions may talk."""

from __future__ import annotations

import make_fixtures
import pytest


@pytest.mark.parametrize("spec", make_fixtures.registered())
def test_payload_is_the_stored_one(spec):
    stored = make_fixtures.stored().get(spec)
    assert stored is not None, f"{spec} has no stored payloads; run: {make_fixtures.COMMAND}"
    now = make_fixtures.made(spec)
    assert set(stored) == set(now), f"other inputs than stored; run: {make_fixtures.COMMAND} {spec.split(':')[0]}"
    changed = [f"the {what} of {name}" for name in now for what, a, b in _pairs(stored[name], now[name]) if a != b]
    assert not changed, (
        f"{spec} writes {' and '.join(changed)} otherwise than stored: ranks of two versions could not talk. "
        f"If that is meant: {make_fixtures.COMMAND} {spec.split(':')[0]}"
    )


def _pairs(stored, now):
    return zip(("payload", "decoded values"), stored, now, strict=True)


def test_nothing_is_stored_that_is_gone():
    gone = set(make_fixtures.stored()) - set(make_fixtures.registered())
    assert not gone, f"{make_fixtures.STORED.name} holds {', '.join(sorted(gone))}, which no class lists any more"
