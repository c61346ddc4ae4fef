"""What no JSON file may hold although decoders take it: against a tree whose faults are known, and texts by hand."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from espresso_mpi.errors import ConfigError
from espresso_mpi.files import json_text, schema
from espresso_mpi.files.json_scan import harmless

NAMES = ("a", "b", "\\u0061", "a b", "ä", "\\u00e4", '\\"', "", "a:")
NUMBERS = {
    "0": True, "-1": True, "1.5e-7": True, "123456789012345678": True, str(2**63 - 1): True, str(-(2**63)): True,
    str(2**63): False, "1" + 400 * "0": False, "1e308": True, "1e309": False, "-1e999": False,
    "1" + 400 * "0" + ".5": False, "1e-999": True, "0." + 400 * "1": True, "NaN": False,
    "-Infinity": False, "1234567890123456789012.5": True,
}  # fmt: skip
"""Specs, and whether float64 or int64 holds them."""


@st.composite
def texts(draw, depth=3):
    """A JSON text, and whether nothing is wrong with it."""
    space = draw(st.sampled_from(["", " ", "\n"]))
    kind = draw(st.integers(0, 3)) if depth else 0
    if kind < 2:
        number = draw(st.sampled_from(sorted(NUMBERS)))
        leaf = draw(st.sampled_from([(number, NUMBERS[number]), ('"NaN \\" {"', True), ("null", True), ("true", True)]))
        return space + leaf[0] + space, leaf[1]
    parts = draw(st.lists(texts(depth=depth - 1), max_size=4))
    fine = all(one for _, one in parts)
    if kind == 2:
        return f"[{space}{','.join(text for text, _ in parts)}{space}]", fine
    names = [draw(st.sampled_from(NAMES)) for _ in parts]
    different = len({json.loads(f'"{name}"') for name in names}) == len(names)
    pairs = ",".join(f'{space}"{name}"{space}:{text}' for name, (text, _) in zip(names, parts))
    return f"{{{pairs}{space}}}", fine and different


def refused(data):
    try:
        json_text.refuse(data)
    except ConfigError:
        return True
    return False


@settings(max_examples=300, deadline=None)  # the scan is compiled at first
@given(texts())
def test_what_is_wrong_is_refused_and_nothing_else(case):
    text, fine = case
    assert refused(text.encode()) is not fine
    assert fine or not harmless(text.encode(), json_text.DEEPEST)


@settings(deadline=None)
@example(b"", '{"\\x": 1, "\\x": 2}')  # keys that no decoder takes
@given(st.binary(max_size=60), st.text('{}[],:"\\ 1e.-aN', max_size=60))
def test_texts_that_are_no_json_are_read_to_their_end(data, text):
    for one in (data, text.encode()):
        refused(one)
        harmless(one, json_text.DEEPEST)


def test_a_large_text_is_scanned_and_its_faults_are_found():
    """The scan takes what a trace or a plan consists of for harmless, so that it is not read token by token."""
    tensors = [{"name": f"t{i}", "size": 10**12, "ready": i * 1.23e-5, "shape": []} for i in range(5000)]
    plan = {f"t{i}": ["none", "flat"] for i in range(5000)}
    whole = json.dumps({"tensors": tensors, "environment": {"name": {"name": None}}, "plan": plan})
    assert len(whole) > json_text._AT_ONCE and harmless(whole.encode(), json_text.DEEPEST)
    for old, new, says in (
        ('"t4000": [', '"t3999": [', "plan: t3999: the key stands twice"),
        ('"t4000": [', '"t3\\u0039\\u00399": [', "plan: t3999: the key stands twice"),
        ('"t4000", "size"', '"t4000", "size": 1, "size"', r"tensors\[4000\]: size: the key stands twice"),
        ('"t4000", "size": 1', '"t4000", "size": 1' + 30 * "0", "got 1000.*a whole number of 64 bits"),
        ('"t4000", "size": 1', '"t4000", "size": 1e99', r"tensors\[4000\]: size: got 1e99000.*a finite number"),
        ('"shape": []', '"shape": ' + 70 * "[" + 70 * "]", "nest more than 64 deep"),
    ):
        assert whole.count(old) >= 1
        with pytest.raises(ConfigError, match=says):
            schema.parse(whole.replace(old, new, 1).encode())


def test_texts_are_read_in_time_that_grows_as_they_do():
    """No quote of these ends a string; to look for its end from each of them anew would take minutes."""
    refused(b'"' + 100_000 * b'\\"')
    refused(100_000 * b'"\\')


def test_no_more_is_read_than_a_file_may_have():
    with pytest.raises(ConfigError, match="/dev/zero: has more than 100000 bytes; expected at most 100000"):
        schema.contents("/dev/zero", 100_000)
