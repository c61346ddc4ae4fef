"""Thousands of tensors and calls: what is done with them grows as their number does, and the buffers stay the same."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from espresso_mpi.arrays.buffers import adopt, flatten
from espresso_mpi.autotune.clock import StepClock
from espresso_mpi.collectives.data.layout import Topology
from espresso_mpi.compressors import get
from espresso_mpi.engine import batches, guard, negotiation
from espresso_mpi.engine.batches import Batch, Item, batch_of, buckets_of
from espresso_mpi.engine.calls import PendingCall
from espresso_mpi.feedback import NO_FEEDBACK
from espresso_mpi.options import Options
from espresso_mpi.state.store import SyncState
from espresso_mpi.types import Plan, Route, Strategy, TensorSpec

TWO = Topology(((0, 1),))
WAYS = [Strategy("none", "flat"), Strategy("none", Route.parse("flat").on("cpu")), Strategy("none", "hierarchical")]


def simple(found_batches, fuse_bytes, room):
    """The members of every bucket by the rule as it is told: each buffer is summed anew for each tensor."""
    found, open_ = [], {}
    for call, item in batches.members_of(found_batches):
        if item.group:
            continue
        if item.compressor is not None or item.spec.nbytes >= fuse_bytes:
            found.append([(call, item)])
            continue
        kind = (item.spec.dtype, item.spec.device, item.strategy)
        buffer = open_.get(kind)
        if buffer is None or sum(i.spec.nbytes for _, i in buffer) + item.spec.nbytes > room:
            buffer = open_[kind] = []
            found.append(buffer)
        buffer.append((call, item))
    return [tuple(members) for members in found]


def random_batches(random):
    def item(index):
        size = int(random.integers(1, 400))
        dtype = str(random.choice(["float32", "float16", "float64"]))
        spec = TensorSpec(f"t{index}", (size,), dtype, str(random.choice(["cpu", "cpu", "gpu"])))
        compressor = get("fp16") if random.random() < 0.1 else None
        group = ("g",) if random.random() < 0.1 else ()
        return Item(index, spec, WAYS[random.integers(len(WAYS))], compressor, NO_FEEDBACK, group)

    def batch():
        items = tuple(item(index) for index in range(int(random.integers(0, 60))))
        return Batch(tuple(item.spec for item in items), items, b"")

    return [batch() for _ in range(int(random.integers(1, 12)))]


@pytest.mark.parametrize("seed", range(20))
def test_buckets_are_those_of_the_simple_rule(seed):
    random = np.random.default_rng(seed)
    some = random_batches(random)
    fuse_bytes, room = int(random.integers(0, 2000)), int(random.integers(1, 6000))
    found = buckets_of(some, fuse_bytes, room)
    assert [tuple(zip(calls, bucket.members)) for bucket, calls in found] == simple(some, fuse_bytes, room)
    assert [bucket.size for bucket, _ in found] == [sum(i.spec.size for i in bucket.members) for bucket, _ in found]


class Name(str):
    """Counts how often any is hashed or compared: what loops in C do with names is seen as well."""

    __slots__ = ()
    hashed = 0

    def __hash__(self):
        Name.hashed += 1
        return str.__hash__(self)

    def __eq__(self, other):
        Name.hashed += 1
        return str.__eq__(self, other)


def work(act):
    """How often functions were called and names hashed."""
    events = [0]

    def count(frame, event, argument):
        events[0] += event in ("call", "c_call")

    before = Name.hashed
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return events[0] + Name.hashed - before


def dense(n):
    return tuple(TensorSpec(Name(f"t{i}"), (100,), "float32") for i in range(n))


def fill_buckets(n):
    buckets_of([batch_of(dense(n), Options(), TWO)], 1 << 20, 1 << 40)


def fill_buckets_by_calls(n):
    buckets_of([batch_of((spec,), Options(), TWO) for spec in dense(n)], 1 << 20, 1 << 40)


def grouped_options(specs):
    names = tuple(spec.name for spec in specs)
    return Options(plan=Plan(dict.fromkeys(names, WAYS[0]), groups=(names,)))


def check_one_group(n):
    batch_of(dense(n), grouped_options(dense(n)), TWO)


def check_one_group_by_calls(n):
    options = grouped_options(dense(n))
    for spec in dense(n):
        batch_of((spec,), options, TWO, alone=False)


def wait_for_one_group(n):
    from espresso_mpi.engine.pending_groups import PendingGroups

    batch = batch_of(dense(n), grouped_options(dense(n)), TWO)
    groups, calls = PendingGroups(), [PendingCall(("push", str(i))) for i in range(n)]
    complete = [groups.add(call, item, False) for call, item in zip(calls, batch.items)]
    assert complete[:-1] == [None] * (n - 1) and [call for call, _, _ in complete[-1]] == calls
    assert groups.count == 0 and not any(call.waiting_tensors for call in calls)


def watch_pushes(n):
    clock = StepClock()
    for spec in dense(n):
        assert not clock.begins([spec.name])
        clock.called(("push", spec.name), (spec,))


def compare_plans(n):
    from espresso_mpi.engine.plan_change import _moved

    old, new = (grouped_options(dense(n)).plan for _ in range(2))
    assert not _moved({(spec.name, 100): ((spec.name, 100),) for spec in dense(n)}, old, new)


def propose_groups(n):
    from espresso_mpi.autotune.autoplan import _of_one_type

    trace = SimpleNamespace(tensors=dense(n))
    assert len(_of_one_type(trace, [spec.name for spec in dense(n)])[0]) == n


def drop_sizes(n):
    sync_state = SyncState()
    for size in range(1, 11):
        for spec in dense(n):
            sync_state.use(spec.name, ((spec.name, size),))
            key = f"{spec.name}|{size}|0|0:{size}|residual"
            sync_state.store[key], sync_state.weights[key] = np.zeros(size, np.float32), 1.0
    assert len(sync_state.store) == len(sync_state.weights) == 8 * n


def claim_strided(n):
    """Among them one as long as all others, as pushes of channels_last gradients that are waited for at the end."""
    memory, claims = np.zeros((3 * n, 4), np.float32), guard.Claims()
    arrays = [memory[: 2 * n, 0], *(memory[2 * i : 2 * i + 2, 1] for i in range(n)), memory[2 * n :, 2]]
    spans = [guard.spans([adopt("w", array)], "push('w')") for array in arrays]
    for span in spans:
        claims.claim(span)
    for span in spans:
        claims.drop(span)


@pytest.mark.parametrize(
    "act",
    [
        fill_buckets, fill_buckets_by_calls, check_one_group, check_one_group_by_calls, wait_for_one_group,
        watch_pushes, compare_plans, propose_groups, drop_sizes, claim_strided,
    ],
)  # fmt: skip
def test_work_grows_with_the_number_of_tensors(act):
    act(2)  # imports, and what is worked out once
    assert work(lambda: act(800)) <= 2.5 * work(lambda: act(400))


@pytest.mark.parametrize("numbers", [[], [0], [7, 8], [3, 64, 65, 1000], list(range(0, 5000, 3))])
def test_bits_and_numbers(numbers):
    size = 700
    text = negotiation.bits_of(numbers, size)
    assert len(text) == size
    mask = int.from_bytes(text, "little")
    assert mask == sum(1 << number for number in numbers) and negotiation.numbers_in(mask) == numbers


def test_batches_are_known_again_and_forgotten_in_time():
    made = []

    def prepare(specs):
        made.append(specs)
        return Batch(specs, (), b"")

    def specs(step, n=3):
        return tuple(adopt(f"{step}.{i}", np.zeros(4, np.float32)).spec for i in range(n))

    known = batches.Batches(limit=20)
    for _ in range(3):
        for call in ("sync", "push"):
            assert known.find((call, ""), specs(0), prepare).specs == specs(0)
    assert len(made) == 2  # a sync must bring groups whole, a push need not
    for step in range(100):
        known.find(("sync", ""), specs(step), prepare)
        assert sum(1 + len(batch.specs) for batch in known.values()) <= 20 + 2 * 4
    assert len(made) == 101


def test_the_description_of_an_array_is_one_object():
    """Else thousands are compared field by field at every call."""
    x = np.zeros((3, 4), np.float32)
    first, again = (adopt(name, array).spec for name, array in flatten({"w": x}) + flatten({"w": x.copy()}))
    assert first is again and adopt("v", x).spec != first and adopt("w", x[:2]).spec != first
