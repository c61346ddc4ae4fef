"""Σ mean(g) = Σ results + residuals, through any sequence of calls, plans, saves and loads.

Rank 0 draws the sequences and tells the others each command; what a command found on any rank is a result that all
share, so that hypothesis may shrink a failure. The oracle needs no weight of the library: in the end every tensor is
synchronised dense, which adds its residuals, and then the sums must agree.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from mpi4py import MPI

from espresso_mpi import Plan, Session, Strategy
from espresso_mpi.types import ROUTES

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(300)]

WORLD = MPI.COMM_WORLD
COMPRESSORS = ("onebit", "topk:ratio=0.1", "int4", "randomk:ratio=0.2", "dense")
SIZES = {"a": (257, 640), "b": (640, 257), "c": (1000,)}  # the group of a and b has one total for two ways
KEYS = [(name, n) for name, sizes in SIZES.items() for n in sizes]
COMPRESSED = [name for name in ROUTES if "encode" in ROUTES[name]]
SEGMENTS = (0, 64, 300)
DENSE = Plan(default=Strategy("none", "flat"))


def nodes_of(ranks, shape):
    """One node, even nodes, uneven ones, or one rank each."""
    half = (ranks + 1) // 2
    shapes = {
        "one": [list(range(ranks))],
        "even": [list(range(half)), list(range(half, ranks))],
        "uneven": [list(range(ranks - 1)), [ranks - 1]],
        "apart": [[rank] for rank in range(ranks)],
    }
    return [node for node in shapes[shape] if node]


def strategy(compressor, route):
    """A Strategy; where payloads cannot be summed, or nothing is compressed, another route serves."""
    if compressor == "dense":
        return Strategy("none", "hierarchical" if "hierarchical" in route else "flat")
    linear = compressor.startswith("randomk")
    return Strategy(compressor, route if linear or "linear" not in route else route.replace("linear", "allgather"))


def plan_of(compressors, routes, group):
    """A plan for a, b and c, some of them in one buffer."""
    ways = {name: strategy(compressor, route) for name, compressor, route in zip(SIZES, compressors, routes)}
    ways.update(dict.fromkeys(group, ways["a"]))
    return Plan({**ways, "other": strategy("dense", "flat")}, groups=(group,) if group else ())


def gradient(rank, step, name, n):
    return np.random.default_rng([rank, step, sum(map(ord, name)), n]).standard_normal(n).astype(np.float32)


class Job:
    """What every rank does at a command of rank 0."""

    def __init__(self, folder):
        self.folder, self.session, self.comm, self.ranks = Path(folder), None, None, 0
        self.given = {key: np.zeros(key[1]) for key in KEYS}
        self.got = {key: np.zeros(key[1]) for key in KEYS}
        self.kept = None
        self.step = 0

    @property
    def part(self):
        return self.comm is not None and self.session is not None

    def open(self, ranks, shape, plan, segment_bytes):
        self.close()
        self.ranks = ranks
        self.comm = WORLD.Split(int(WORLD.rank >= ranks), WORLD.rank)
        if WORLD.rank < ranks:
            self.session = Session(
                self.comm, plan=plan, nodes=nodes_of(ranks, shape), segment_bytes=segment_bytes, timeout=30
            )

    def sync(self, sizes, pushed):
        """One step: what all ranks should get, and what they got."""
        self.step += 1
        keys = list(zip(SIZES, sizes))
        for name, n in keys:
            self.given[name, n] += (
                sum(gradient(r, self.step, name, n).astype(float) for r in range(self.ranks)) / self.ranks
            )
        self._sync({name: gradient(WORLD.rank, self.step, name, n) for name, n in keys}, pushed)

    def _sync(self, grads, pushed=False):
        if not self.part:
            return
        if pushed:
            for name, grad in grads.items():
                self.session.push(name, grad)
            self.session.wait_all()
        else:
            self.session.sync(grads)
        for name, grad in grads.items():
            self.got[name, grad.size] += grad

    def follow(self, plan):
        if self.part:
            self.session.follow(plan)

    def save(self):
        if self.part:
            self.session.save(self.folder)
        self.kept = {key: value.copy() for key, value in self.given.items()}, {k: v.copy() for k, v in self.got.items()}

    def load(self, ranks, shape, plan, segment_bytes):
        """Go back to what was saved, on other ranks; those that were not there learn what they missed."""
        self.open(ranks, shape, plan, segment_bytes)
        if self.part:
            self.session.load(self.folder)
        given, got = WORLD.bcast(self.kept)
        self.given = {key: value.copy() for key, value in given.items()}
        self.got = {key: value.copy() for key, value in got.items()}

    def flush(self):
        """Add all residuals: a dense step with gradients of zero."""
        self.follow(DENSE)
        for sizes in itertools.zip_longest(*SIZES.values()):
            self._sync({name: np.zeros(n, np.float32) for name, n in zip(SIZES, sizes) if n})
        if self.part:
            assert not self.session.state_dict()["arrays"]
            for key in KEYS:
                scale = max(1.0, np.abs(self.given[key]).max())
                error = np.abs(self.given[key] - self.got[key]).max() / scale
                assert error < 2e-5, f"{key}: {error:.3g} of the sum is missing"

    def close(self):
        if self.session is not None:
            self.session.close()
        if self.comm is not None:
            self.comm.Free()
        self.session = self.comm = None


def obey(job, command, arguments):
    """Carry a command out; every rank raises what went wrong on any."""
    problem = None
    try:
        getattr(job, command)(*arguments)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    problems = {f"rank {rank}: {text}" for rank, text in enumerate(WORLD.allgather(problem)) if text}
    if problems:
        raise AssertionError(f"{command}{arguments}: {'; '.join(sorted(problems))}")


def follow_rank_0():
    """What the other ranks do until rank 0 has finished; its failures are its own to report."""
    job = None
    while (said := WORLD.bcast(None)) is not None:
        command, arguments = said
        if command == "begin":
            job = Job(*arguments)
            continue
        try:
            obey(job, command, arguments)
        except AssertionError:
            continue


plans = st.builds(
    lambda compressors, *rest: (tuple(compressors), *rest),
    st.lists(st.sampled_from(COMPRESSORS), min_size=3, max_size=3),
    st.lists(st.sampled_from(COMPRESSED), min_size=3, max_size=3),
    st.sampled_from([(), ("a", "b"), ("a", "b", "c"), ("a", "c", "b"), ("b", "a")]),
)
shapes = st.sampled_from(["even", "uneven", "even", "uneven", "apart", "one"])
chosen = st.tuples(*(st.sampled_from(sizes) for sizes in SIZES.values()))
ranks_ = st.integers(1, WORLD.size)


class Conservation(RuleBasedStateMachine):
    """Any sequence of what a user may do with a session."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="espresso-conservation-")
        self.saved, self.failed = None, False
        self.job = Job(self.folder)
        WORLD.bcast(("begin", (self.folder,)))

    def tell(self, command, *arguments):
        WORLD.bcast((command, arguments))
        try:
            obey(self.job, command, arguments)
        except AssertionError:
            self.failed = True
            raise

    @initialize(shape=shapes, given=plans, segment=st.sampled_from(SEGMENTS))
    def start(self, shape, given, segment):
        self.compressors, routes, self.group = given
        self.shape = shape
        self.tell("open", WORLD.size, shape, self._plan(routes, shape), segment)

    def _plan(self, routes, shape):
        flat = shape == "one"  # no level between nodes there
        return plan_of(self.compressors, [_flat(r) if flat else r for r in routes], self.group)

    @rule(
        which=st.tuples(*(st.sampled_from(sizes) for sizes in SIZES.values())),
        pushed=st.booleans(),
        times=st.integers(1, 3),
    )
    def sync(self, which, pushed, times):
        for _ in range(times):
            self.tell("sync", which, pushed)

    @rule(given=plans, which=chosen, pushed=st.booleans())
    def follow(self, given, which, pushed):
        self.compressors, routes, self.group = given
        self.tell("follow", self._plan(routes, self.shape))
        self.tell("sync", which, pushed)

    @rule()
    def save(self):
        self.saved = (self.compressors, self.group)
        self.tell("save")

    @precondition(lambda self: self.saved)
    @rule(
        ranks=ranks_,
        shape=shapes,
        routes=st.lists(st.sampled_from(COMPRESSED), min_size=3, max_size=3),
        segment=st.sampled_from(SEGMENTS),
    )
    def load(self, ranks, shape, routes, segment):
        """With the methods of the state, as a load demands."""
        self.compressors, self.group = self.saved
        self.shape = shape
        self.tell("load", ranks, shape, self._plan(routes, shape), segment)

    def teardown(self):
        try:
            if not self.failed:
                self.tell("flush")
        finally:
            self.tell("close")
            shutil.rmtree(self.folder, ignore_errors=True)


def _flat(route):
    return route.replace("hierarchical", "flat").replace("-packed", "")


def test_nothing_is_lost_whatever_is_done(pytestconfig):
    if WORLD.rank:
        follow_rank_0()
        return
    examples = 5 if pytestconfig.getoption("quick") else 20
    try:
        run_state_machine_as_test(
            Conservation,
            settings=settings(
                max_examples=examples, stateful_step_count=12, deadline=None, derandomize=True, database=None,
                phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
            ),
        )  # fmt: skip
    finally:
        WORLD.bcast(None)
