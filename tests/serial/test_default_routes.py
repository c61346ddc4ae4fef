"""Which route is taken where none was named: by a session's rule, and by a profile where there is one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from planner_cases import random_profile, random_trace

from espresso_mpi import Plan, autoplan, compressors
from espresso_mpi.collectives.layout import Topology
from espresso_mpi.options import Options
from espresso_mpi.planner.problem import evaluated
from espresso_mpi.planner.tree import named_routes
from espresso_mpi.tuning import Tuning
from espresso_mpi.types import ROUTES, Route, Strategy

FOUR_BY_FOUR = Topology(tuple(tuple(range(4 * h, 4 * h + 4)) for h in range(4)))


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("spelling", ["none", "int8", "fp16", "powersgd"])
def test_named_routes_are_those_that_payloads_can_take(spelling, hierarchical):
    method = None if spelling == "none" else compressors.get(spelling)
    endings = {"": spelling == "none", "allgather": True, "alltoall": True, "alltoall-packed": True}
    endings["linear"] = spelling in ("fp16", "powersgd")
    wanted = [
        name
        for name in ROUTES
        if (hierarchical or name.startswith("flat"))
        and endings[name.partition("-")[2]]
        and ("-" in name) == (spelling != "none")
    ]
    assert named_routes(method, hierarchical) == tuple(map(Route.parse, wanted))


def test_a_session_that_has_a_profile_tries_compressors_along_the_named_route_that_is_quickest_by_it():
    """The route of its rule is for sessions that have measured nothing."""
    different = 0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        trace, profile = random_trace(rng, 4, "cpu"), random_profile(rng, compressors=("fp16",))
        options = Options(tuning=Tuning())
        tried = list(
            autoplan._candidates(SimpleNamespace(topology=FOUR_BY_FOUR), options, trace, profile, Tuning(("fp16",)))
        )
        like = tried[0].forecast
        seconds = {}
        for route in named_routes(compressors.get("fp16"), True):
            problem, choice = evaluated(
                Plan(default=Strategy("fp16", route)), trace, profile, lanes=like.lanes, order=like.order
            )
            seconds[route] = problem.seconds(choice)
        best = Strategy("fp16", min(seconds, key=seconds.get))
        assert dict.fromkeys((t.name for t in trace.tensors), best) in [dict(one.strategies) for one in tried]
        rule = Options(compressor="fp16").strategy(
            SimpleNamespace(nbytes=1 << 20, device="cpu"), FOUR_BY_FOUR
        )
        different += rule != best
    assert different
