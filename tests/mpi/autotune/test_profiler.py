"""The profiler on real ranks: what it measures, that all ranks agree, how long it takes, what it refuses."""

from __future__ import annotations

import json
import time
from functools import partial

import pytest
from mpi4py import MPI

from espresso_mpi import Session
from espresso_mpi.autotune.profiler import measure
from espresso_mpi.cli import profile as bench
from espresso_mpi.collectives.messages.transport import Transport
from espresso_mpi.errors import ConfigError
from espresso_mpi.options import Options
from espresso_mpi.planner.model.cost import operations
from espresso_mpi.planner.model.profile import Profile
from espresso_mpi.planner.model.tree import routes
from espresso_mpi.types import Strategy

SIZES = [1000, 20_000]


@pytest.fixture
def opened(world):
    """Opens transports; they are closed on all ranks if the test passed."""
    found = []

    def opener(nodes=None):
        options, problem = Options.checked(nodes=nodes, timeout=60.0)
        assert problem is None
        found.append(Transport.open(world, options.transport(), lambda notes: None))
        return found[-1]

    yield opener
    for transport in found:
        transport.close()


def split(world):
    """Two nodes of half the ranks each, or of one."""
    half = world.size // 2
    return [tuple(range(half)), tuple(range(half, world.size))]


@pytest.mark.parametrize("nodes", [pytest.param("found", marks=pytest.mark.thorough), "two"])
def test_every_route_can_be_priced(world, opened, nodes):
    wanted = None if nodes == "found" else split(world)
    transport = opened(wanted)
    opener = partial(Session, world, nodes=wanted)
    start = time.process_time()  # other work on the node does not count
    found = measure(transport, ["int8", "randomk:ratio=0.1"], open_session=opener, sizes=SIZES, seconds=1, pushes=False)
    took = time.process_time() - start

    assert (found.nodes, found.ranks_per_node) == ((1, world.size) if wanted is None else (2, world.size // 2))
    assert len(set(world.allgather(json.dumps(found.to_json())))) == 1
    assert Profile.from_json(json.loads(json.dumps(found.to_json()))) == found
    for method in ("int8", "randomk:ratio=0.1"):
        for route in routes(("cpu",), linear=method != "int8")[world.rank :: world.size]:  # all have one profile
            strategy = Strategy(method if route.compressed else "none", route)
            steps = operations(strategy, SIZES[1], found)
            assert steps and all(step.seconds >= 0 for step in steps)
            assert sum(step.seconds for step in steps) > 0
    assert took < 20, "the budget of a second, and compiling"
    assert found.call > 0 or found.tensor > 0 or found.check(0) > 0


def test_samples_tell_how_they_were_made(world, opened):
    found = measure(opened(), ["onebit"], open_session=partial(Session, world), sizes=[4096], seconds=3)
    curves = dict(found.curves())
    assert {"codec onebit|cpu|encode", "codec onebit|cpu|decode", "check"} <= set(curves)
    for curve in curves.values():
        assert curve.samples
        assert all(sample.seconds > 0 for sample in curve.samples)
    left_out = found.environment["left_out"]  # where other work takes the processor, points take longer than allowed
    sizes = {sample.size for sample in found.codec("onebit", "cpu", "encode").samples}
    regions = {4096, -(-4096 // world.size)}
    assert sizes <= regions and {f"onebit on the cpu with {n} elements" for n in regions - sizes} <= set(left_out)
    dense = max(sample.size for sample in found.move("allreduce", "flat").samples)
    assert dense == 4 * 4096 or (dense < 4 * 4096 and any("allreduce@flat at 16384 bytes" in text for text in left_out))
    assert found.fingerprint["nodes"] == 1 and found.fingerprint["ranks_per_node"] == world.size
    assert "hostname" not in found.fingerprint and "date" not in found.fingerprint


def test_larger_data_takes_longer(world, opened):
    """Beside other work, a few samples may say otherwise: then those of more time."""
    transport = opened()
    for seconds in (2, 8, 32):
        found = measure(
            transport, ["fp16"], open_session=partial(Session, world), sizes=[1 << 10, 1 << 20], seconds=seconds
        )
        curves = [found.move("allreduce", "flat"), found.codec("fp16", "cpu", "encode"), found.check]
        grow = [curve(curve.samples[-1].size) > curve(curve.samples[0].size) for curve in curves]
        if world.allreduce(all(grow), MPI.LAND):
            return
    # Where other work takes the processor, large sizes would take longer than allowed.
    small = [curve.samples[-1].size <= 64 * curve.samples[0].size for curve in curves]
    assert all(low or more for low, more in zip(small, grow)) and found.environment["left_out"], (small, grow)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"seconds": 0}, "expected a number above 0"),
        ({"sizes": []}, "elements of tensors"),
        ({"sizes": [0]}, "elements of tensors"),
        ({"devices": ["tpu"]}, "cpu, gpu"),
        ({"compressors": ["nosuch"]}, "nosuch"),
        ({"compressors": "onebit"}, "a sequence of specs"),
    ],
)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(world, opened, given, text):
    transport = opened()
    arguments = {"compressors": ["fp16"], "sizes": [1000], "seconds": 1.0}
    if world.rank == world.size - 1:
        arguments |= given
    with pytest.raises(ConfigError, match=text):
        measure(transport, arguments.pop("compressors"), open_session=partial(Session, world), **arguments)


def test_ranks_that_ask_for_different_things_hear_of_it(world, opened):
    with pytest.raises(ConfigError, match=rf"rank {world.size - 1}.*something else than rank 0"):
        measure(
            opened(), ["fp16"], open_session=partial(Session, world), sizes=[1000 + (world.rank == world.size - 1)],
            devices=["cpu"], seconds=1.0,
        )  # fmt: skip


def test_the_command_writes_what_it_measured(world, tmp_path, capsys):
    path = world.bcast(tmp_path / "profile.json")
    found = bench.main(output=path, compressors="fp16", sizes="4KiB", seconds=2)
    world.Barrier()
    assert Profile.load(path) == found
    said = capsys.readouterr().out
    assert (f"wrote {path}" in said) == (world.rank == 0)


def test_the_command_refuses_a_file_that_cannot_be_written(world, tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        bench.main(output=world.bcast(tmp_path) / "no" / "profile.json", seconds=2)
