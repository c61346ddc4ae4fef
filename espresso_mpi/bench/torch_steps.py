"""``bench torch``: what a training step of a small GPT in PyTorch takes, by DDP over gloo and by this library's ways.

All train the same model by AdamW, in turns within each repetition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ConfigError
from .defaults import Torch as Defaults
from .gpt_shape import Shape
from .harness.columns import MS, PERCENT, RATIO, Column, Table
from .harness.suite import Suite
from .harness.timing import TimedMethod, interleaved


@dataclass(frozen=True)
class Row:
    """One way. Times are of the slowest rank.

    Attributes:
        way: what synchronises the gradients; method: the compressor, or torch's hook.
        seconds, p99: median and 99th percentile of a step.
        over_gloo: median, over repetitions, of the step's time over that of DDP over gloo with the same kind of method,
            or without one where torch has none; None: that was not measured.
        exposed: seconds beyond a step that computes alone.
        overhead: share of a step by ``session.sync`` of the same gradients that this one takes longer: the median over
            repetitions; None: that was not measured.
        planning: seconds that the steps until ``plan="auto"`` had chosen took longer than as many steps by its plan.
        parameters: of the model; repeats: repetitions that were made.
    """

    way: str
    method: str
    seconds: float
    p99: float
    over_gloo: float | None
    exposed: float | None
    parameters: int
    repeats: int
    overhead: float | None = None
    planning: float | None = None


TABLE = Table(
    (
        Column("way", "way", left=True),
        Column("method", "method", left=True),
        Column("step", "seconds", MS),
        Column("p99", "p99", MS),
        Column("exposed", "exposed", MS),
        Column("/ gloo", "over_gloo", RATIO),
        Column("over plain", "overhead", PERCENT),
        Column("planning s", "planning", RATIO),
    )
)


def main(
    methods: str = Defaults.methods,
    batch: int = Defaults.batch,
    width: int = Defaults.width,
    layers: int = Defaults.layers,
    repeats: int = Defaults.repeats,
    seconds: float | None = None,
    json: Path | None = None,
) -> list[Row]:
    """Measure, print a table on rank 0, and write JSON if asked. Collective.

    Args:
        methods: comma list of ways and methods, such as ``gloo:none,push:int8``; see ``averaging.WAYS``.
        batch: sequences of a rank and step; width, layers: of the GPT.
        repeats: most timed repetitions of each.
        seconds: time for each after which no further repetition is begun, but for the first three.
        json: file for the result.

    Raises:
        ConfigError: PyTorch is missing, or a way or method is unknown.
    """
    from mpi4py import MPI

    try:
        from . import torch_ways
    except ImportError as error:
        raise ConfigError("bench torch needs PyTorch: python -m pip install torch (its CPU build does)") from error
    import torch

    torch.set_num_threads(1)
    world, shape = MPI.COMM_WORLD, Shape(width=width, layers=layers)
    run = Suite("torch", world, json)
    gloo = torch_ways.open_groups()
    ways = [torch_ways.Way(world, spec, shape, batch, gloo) for spec in methods.split(",")]
    for way in ways:
        way.settle()
    with run.repetitions(1, repeats, None if seconds is None else seconds * len(ways)) as repetitions:
        times = interleaved(world, [TimedMethod(way.spec, way.step) for way in ways], repetitions)
    found = rows([way.spec for way in ways], times, shape.parameters, {way.spec: way.planning for way in ways})
    for way in ways:
        way.close()
    title = f"GPT of {shape.parameters / 1e6:.1f} M parameters, AdamW, batch {batch}, {world.size} ranks"
    run.publish(TABLE, title, found, network=title)
    return found


def rows(
    specs: Sequence[str],
    times: np.ndarray,
    parameters: int,
    planning: Mapping[str, tuple[float, int] | None] | None = None,
) -> list[Row]:  # fmt: skip
    """The results, from seconds of shape (repetitions, specs).

    ``planning``: seconds and number of the steps until a plan was chosen, by spec.
    """
    place = {spec: number for number, spec in enumerate(specs)}
    found = []
    for number, spec in enumerate(specs):
        way, _, method = spec.partition(":")
        kind = method.partition(":")[0]
        rival = next((place[s] for s in place if s.startswith("gloo:") and s.split(":")[1] == kind), None)
        rival = place.get("gloo:none") if rival is None else rival
        ratio = None if rival is None or way == "alone" else float(np.median(times[:, number] / times[:, rival]))
        exposed = None
        if "alone" in place and way != "alone":
            exposed = float(np.median(times[:, number] - times[:, place["alone"]]))
        plain, overhead = place.get(f"plain:{method}"), None
        if plain is not None and way in ("ddp", "push", "sync", "gradsync"):
            overhead = float(np.median(times[:, number] / times[:, plain]) - 1)
        median, p99 = float(np.median(times[:, number])), float(np.percentile(times[:, number], 99))
        until = (planning or {}).get(spec)
        lost = None if until is None else until[0] - until[1] * median
        found.append(Row(way, method, median, p99, ratio, exposed, parameters, len(times), overhead, lost))
    return found
