"""What becomes of arrays that callers pass."""

from __future__ import annotations

import numpy as np

from espresso_mpi.collectives.data.layout import Topology
from espresso_mpi.engine.intake import Intake
from espresso_mpi.options import Options


def test_the_call_in_which_a_plan_is_made_goes_by_it_already():
    """Being told of a call may end a step, after which the session plans: its options are others then."""
    intake, array = Intake(Topology(((0, 1),))), np.ones(100, np.float32)
    chosen = [Options.checked(compressor="none", min_bytes=0)[0]]

    def noted(call, arrays, gradients):
        assert [name for name, _ in arrays] == ["w"] and np.shares_memory(gradients[0].array, array)
        chosen[0] = Options.checked(compressor="onebit", min_bytes=0)[0]

    call = intake.pending_call(("sync", ""), array, lambda: [("w", array)], "sync", None, lambda: chosen[0], noted)
    assert call.problem is None
    assert [item.strategy.compressor for item in call.batch.items] == ["onebit"]
    assert [item.strategy.compressor for b in intake.batches.values() for item in b.items] == ["onebit"]
