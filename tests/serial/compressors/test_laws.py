"""Every law of ``laws.py`` on every registered compressor: a new file in ``espresso_mpi/compressors`` is found here.

``-k qsgd`` selects a method, ``-k is_unbiased`` a law.
"""

from __future__ import annotations

import pytest
from law_tools import spellings_of
from laws import LAWS

from espresso_mpi.compressors import get, names

SPELLINGS = [spelling for name in names() for spelling in spellings_of(name)]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_law(spelling, law):
    law(get(spelling).at(None))
