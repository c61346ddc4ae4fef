"""Every law of ``laws.py`` on every registered compressor: a new file in ``espresso_mpi/compressors`` is found here.

``-k qsgd`` selects a method, ``-k is_unbiased`` a law.
"""

from __future__ import annotations

import pytest
from law_tools import specs_of, takes_another_branch
from laws import LAWS

from espresso_mpi.compressors import get, names

SPECS = [spec for name in names() for spec in specs_of(name)]

COSTLY = {
    "writes_its_arrays_and_nothing_else", "takes_any_input", "keeps_its_bounds", "keeps_its_bounds_on_bad_inputs",
    "error_on_gaussian_values", "is_unbiased", "same_bytes_on_any_number_of_threads", "tensors_have_shapes",
    "feedback_stays_bounded", "survives_damage", "survives_any_payload",
}  # fmt: skip
"""Laws with many elements, with inputs from hypothesis, or with hundreds of seeds, steps or payloads."""


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
