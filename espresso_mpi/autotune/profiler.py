"""Measures this cluster: what every step of every route costs, from the code that sessions run.

The parts are in ``profiling``: collectives (``moves``), encodes and decodes (``codecs``), what a session takes beyond
them for a call (``calls``) and for a step of training (``whole_steps``), each repeated until its median is known
(``repeating``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..cluster import environment
from ..collectives.messages.agreement import allgather_json
from ..collectives.messages.transport import Transport
from ..options import DEFAULT_SEGMENT
from ..planner.model.profile import Profile
from ..types import DeviceKind
from .profiling import whole_steps
from .profiling.calls import Calls, SessionOpener
from .profiling.codecs import Codecs
from .profiling.moves import Moves
from .profiling.repeating import Repeating
from .profiling.request import Request, agreed


def measure(
    transport: Transport,
    specs: Sequence[str],
    *,
    open_session: SessionOpener,
    sizes: Sequence[int] | None = None,
    seconds: float = 60.0,
    tick: Callable[[float], None] = lambda share: None,
    devices: Sequence[DeviceKind] | None = None,
    segment_bytes: int = DEFAULT_SEGMENT,
    pushes: bool = True,
) -> Profile:
    """Measure what routes are made of. Collective; the same profile on every rank, made from the slowest rank's times.

    Args:
        specs: of the compressors; "none" is ignored. Scheduled ones are measured as they are in the end.
        open_session: opens a session on the same ranks, given options: ``functools.partial(Session, comm)``.
        sizes: elements of the tensors that the profile is for; default: all sizes up to 16 MiB. With sizes the measured
            points are few, and those that such tensors bring about.
        seconds: time for all of it, once the kernels are loaded.
        tick: is called now and then with the share that is done, 0 to 1.
        devices: where encodes and decodes run; default: the CPU, and the GPU where all ranks have one.
        segment_bytes: how sessions cut tensors, for the profile.
        pushes: measure as well what hides when gradients are pushed; else the profile says that all does.

    Raises:
        ConfigError: on every rank: an argument does not fit. RankTimeoutError: a rank did not come.
    """
    request = agreed(transport, specs, sizes, seconds, devices)
    repeating = Repeating(transport, request.seconds, tick)
    moves, codecs = Moves(repeating, request), Codecs(repeating, request)
    moves.warm_up()
    codecs.warm_up()
    repeating.begin()
    steps = _operations(transport, moves, codecs, segment_bytes)
    usual = request.usual(transport.topology)
    profile = Calls(repeating, usual).measured(steps, open_session, moves.reach)
    profile = whole_steps.measured(repeating, usual, profile, open_session, pushes, moves.reach)
    here, fingerprint = _surroundings(transport, request, repeating.left_out)
    here["queueing_on_gpu"] = codecs.queueing
    tick(1.0)
    return replace(profile, environment=here, fingerprint=fingerprint)


def _operations(transport: Transport, moves: Moves, codecs: Codecs, segment_bytes: int) -> Profile:
    """What the operations of routes take, each by itself. Collective."""
    moved, coded, copied, checked = moves.curves(), codecs.codecs(), codecs.copies(), codecs.checks()
    return Profile(
        len(transport.topology.nodes),
        transport.topology.local_size,
        moves=moved,
        codecs=coded,
        copies=copied,
        check=checked["cpu"],
        check_on_gpu=checked.get("gpu"),
        segment_bytes=segment_bytes,
    )


def _surroundings(
    transport: Transport, request: Request, left_out: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The environment of rank 0, and the fingerprint: what a plan made with these figures depends on.

    What changes from job to job on the same cluster (hostnames, date) is in the environment alone, and so is what
    changes the speed of kernels by little (the versions of Python and numba).
    """
    facts = environment.environment()
    mine = {"environment": facts, "cpu": facts["cpu"]}
    every = allgather_json(transport, json.dumps(mine).encode())
    mpi = every[0]["environment"]["mpi"]
    here = {**every[0]["environment"], "left_out": list(left_out), "hostnames": sorted(set(transport.hostnames))}
    fingerprint = {
        "nodes": len(transport.topology.nodes),
        "ranks_per_node": transport.topology.local_size,
        "mpi": f"{mpi['library']} {mpi['version']}",
        "espresso_mpi": environment.version("espresso-mpi"),
        "devices": list(request.devices),
        "cpu": ", ".join(sorted({note["cpu"] for note in every})),
    }
    return here, fingerprint
