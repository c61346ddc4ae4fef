"""Every law of ``laws.py`` on every registered compressor: a new file in ``espresso_mpi/compressors`` is found here.

``-k qsgd`` selects a method, ``-k is_unbiased`` a law.
"""

from __future__ import annotations

from dataclasses import fields

import pytest
from law_tools import specs_of
from laws import LAWS

from espresso_mpi.compressors import get, names

SPECS = [spec for name in names() for spec in specs_of(name)]

COSTLY = {
    "writes_its_arrays_and_nothing_else", "takes_any_input", "keeps_its_bounds", "keeps_its_bounds_on_bad_inputs",
    "error_on_gaussian_values", "is_unbiased", "same_bytes_on_any_number_of_threads", "tensors_have_shapes",
    "feedback_stays_bounded", "survives_damage", "survives_any_payload",
}  # fmt: skip
"""Laws with a million elements, with inputs from hypothesis, or with hundreds of seeds, steps or payloads."""

AMOUNTS = {"rank", "cols", "rows", "columns", "beta", "mu", "value"}


def takes_another_branch(spec):
    """Whether a kernel does something else than for the method's name alone, and not only more or less of the same."""
    method, plain = get(spec), get(spec.partition(":")[0])
    given = {field.name: getattr(method, field.name) for field in fields(method)}
    return any(not _only_an_amount(name, value) for name, value in given.items() if value != getattr(plain, name))


def _only_an_amount(name, value):
    if name == "ratio":
        return value != 1.0  # nothing is left out
    if name == "block":
        return value % 64 == 0  # whole words
    return name in AMOUNTS


def cases():
    """Every law with every spec; costly ones with variants that only do more or less of the same are `thorough`."""
    for spec in SPECS:
        once = ":" in spec and not takes_another_branch(spec)
        for law in LAWS:
            marks = [pytest.mark.thorough] if once and law.__name__ in COSTLY else []
            yield pytest.param(spec, law, marks=marks, id=f"{spec}-{law.__name__}")


@pytest.mark.parametrize("spec, law", list(cases()))
def test_law(spec, law):
    law(get(spec).at(None))
