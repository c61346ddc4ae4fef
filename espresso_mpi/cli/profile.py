"""``profile``: what this cluster costs, measured for the planner and written as JSON."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from ..bench.defaults import Profile as Defaults
from ..bench.harness.columns import size_text
from ..bench.ticks import STEPS, Ticks
from ..compressors import read_specs
from ..errors import ConfigError
from ..files.output import check_writable, milliseconds, progress, show
from ..planner.model.profile import Profile

LARGE_ERROR = 0.1
"""Typical relative error of a median above which the figures are called rough."""

_SHOWN = (64 << 10, 1 << 20)
"""Bytes at which the summary shows curves."""

_SIZE = re.compile(r"\d+ (bytes|elements)$")
"""What points that were left out are told apart by."""


def main(
    output: Path = Path(Defaults.output),
    compressors: str = Defaults.compressors,
    sizes: str | None = None,
    seconds: float = Defaults.seconds,
) -> Profile:
    """Measure, write the profile on rank 0, and print a summary. Collective.

    Args:
        output: the profile's JSON.
        compressors: comma list of specs.
        sizes: comma list of sizes of float32 tensors that the profile is for, such as ``64KiB,1MiB``; default: all up
            to 16 MiB.
        seconds: time for all of it.

    Raises:
        ConfigError: on every rank: the file cannot be written, or an argument does not fit.
    """
    from mpi4py import MPI

    from ..autotune.profiler import measure
    from ..collectives.messages.agreement import on_rank_0
    from ..collectives.messages.transport import Transport
    from ..files.output import parse_sizes
    from ..options import Options
    from ..session import Session

    world = MPI.COMM_WORLD
    on_rank_0(world, lambda: check_writable(output, "--output"), ConfigError)  # before anything is measured
    elements = None if sizes is None else [nbytes // 4 for nbytes in parse_sizes(sizes)]
    transport = Transport.open(world, Options().transport(), lambda notes: None)
    with progress("profile", STEPS, world.rank == 0) as advance:
        tick = Ticks(advance)
        profile = measure(
            transport, read_specs(compressors), open_session=partial(Session, world), sizes=elements, seconds=seconds,
            tick=tick,
        )  # fmt: skip
    transport.close()
    if world.rank == 0:
        profile.save(output)
        _print(profile)
        print(f"wrote {output}")
    return profile


# --- output -----------------------------------------------------------------------------------------------------------


def _print(profile: Profile) -> None:
    codecs, moves = tables(profile)
    sizes = [f"{size_text(nbytes)}\nms" for nbytes in _SHOWN]
    title = f"{profile.nodes} node(s), {profile.ranks_per_node} rank(s) each"
    show(f"{title}: float32 bytes", ["codec", *sizes, "samples", "spread"], codecs, left=("codec",))
    show(
        f"{title}: bytes that a rank puts in", ["collective", *sizes, "samples", "spread"], moves, left=("collective",)
    )
    print(f"a call {milliseconds(profile.call)} ms, a tensor {milliseconds(profile.tensor)} ms more")
    print(
        f"pushes hide {profile.hidden:.0%} of what they could; each tensor takes {milliseconds(profile.pushed)} ms more"
    )
    print(f"computing takes {profile.slowed:.0%} longer while pushed gradients travel")
    for line in remarks(profile):
        print(line)


def tables(profile: Profile) -> tuple[list[list[str]], list[list[str]]]:
    """Lines of the tables of codecs and of collectives."""
    codecs = [
        _line(f"{name} {direction}@{where}", curve, [curve(nbytes // 4) for nbytes in _SHOWN])
        for (name, where, direction), curve in profile.codecs.items()
    ]
    moves = [
        _line(f"{op}@{level}{', roots alone' if alone else ''}", curve, [curve(nbytes) for nbytes in _SHOWN])
        for (op, level, alone), curve in sorted(profile.moves.items())
    ]
    return codecs, moves


def _line(name: str, curve: Any, seconds: list[float]) -> list[str]:
    return [name, *map(milliseconds, seconds), str(len(curve.samples)), f"{curve.spread:.0%}"]


def remarks(profile: Profile) -> list[str]:
    """Warnings for users of the profile."""
    found = []
    if profile.noise() > LARGE_ERROR:
        found.append(
            f"the figures are rough: the typical error of a median is {profile.noise():.0%}; measure again while "
            f"nothing else runs, or longer with --seconds"
        )
    left_out = profile.environment.get("left_out", [])
    if left_out:
        kinds = Counter(size[0] if (size := _SIZE.search(text)) else text for text in left_out)
        found.append(
            f"{len(left_out)} points were left out because time ran out ({', '.join(sorted(kinds))}); the curves are "
            f"extrapolated from smaller sizes; --seconds gives more time"
        )
    return found
