"""Messages that measure times do not count, and nobody sees them while they travel."""

from __future__ import annotations

import pytest

from espresso_mpi import Session
from espresso_mpi.collectives.messages.uncounted import uncounted


@pytest.mark.parametrize("failing", [False, True])
def test_what_is_sent_to_measure_is_never_seen(failing):
    with Session() as session:
        transport = session._transport
        transport.posted["inter"] = 100
        try:
            with uncounted(transport):
                transport.posted["inter"] += 7
                transport.posted["intra"] += 5
                assert session.stats().bytes_by_level == {"intra": 0, "inter": 100}
                if failing:
                    raise ValueError
        except ValueError:
            assert failing
        assert session.stats().bytes_by_level == {"intra": 0, "inter": 100}
        transport.posted["inter"] += 3
        assert session.stats().bytes_by_level == {"intra": 0, "inter": 103}
