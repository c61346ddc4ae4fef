"""What is to be measured, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from ... import compressors
from ...arrays import device
from ...collectives.data.layout import Topology
from ...collectives.messages.agreement import first_failure, on_every_rank
from ...collectives.messages.transport import Transport
from ...compressors import Compressor
from ...errors import ConfigError
from ...options import default_route
from ...types import DeviceKind, Route, Strategy

BYTES = tuple(4**k for k in range(5, 13))
"""Bytes of the tensors that collectives are measured with by default: 1 KiB to 16 MiB."""

ELEMENTS = tuple(4**k for k in range(4, 12))
"""Elements that encodes and decodes are measured with by default: 256 to 4 Mi."""

POINTS = 5
"""Sizes that are measured at most where the sizes of tensors are given."""


@dataclass(frozen=True)
class Request:
    """What is to be measured, the same on every rank."""

    methods: Mapping[str, Compressor]
    nbytes: tuple[int, ...]
    elements: tuple[int, ...]
    seconds: float
    devices: tuple[DeviceKind, ...]

    def usual(self, topology: Topology) -> list[Strategy]:
        """The strategies that sessions choose by themselves: of the last method, dense, and of the first method."""
        found = []
        methods = list(self.methods.items())
        for name, method in dict([*methods[-1:], *methods[:1]]).items():
            route = default_route(topology, compressed=True, summed=method.common)
            found.append(Strategy(name, Route.parse(route)))
        found.insert(1, Strategy("none", Route.parse(default_route(topology, compressed=False))))
        return found


def agreed(
    transport: Transport,
    specs: Sequence[str],
    sizes: Sequence[int] | None,
    seconds: float,
    devices: Sequence[DeviceKind] | None,
) -> Request:
    """The arguments, checked on all ranks: what is wrong on one is an error on all."""
    request, notes = on_every_rank(
        transport,
        lambda: _checked(transport.topology, specs, sizes, seconds, devices),
        ConfigError,
        doing="profile",
        say=lambda mine: {
            "request": repr(mine if devices is not None else replace(mine, devices=())),
            "devices": mine.devices,
        },
        wording=first_failure,
    )
    common = [d for d in request.devices if all(d in note["devices"] for note in notes)]
    different = [rank for rank, note in enumerate(notes) if note["request"] != notes[0]["request"]]
    if different:
        raise ConfigError(
            f"profile: {transport.describe(different[0])} was asked to measure something else than rank 0; pass the "
            f"same arguments on every rank"
        )
    return replace(request, devices=tuple(common)) if devices is None else request


def _checked(
    topology: Topology,
    specs: Sequence[str],
    sizes: Sequence[int] | None,
    seconds: float,
    devices: Sequence[DeviceKind] | None,
) -> Request:
    if isinstance(specs, str):
        raise ConfigError(f"profile: compressors={specs!r}; expected a sequence of specs, such as ['onebit']")
    methods = {str(m): m.at(None) for m in (compressors.get(s) for s in specs if s != "none")}
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise ConfigError(f"profile: seconds={seconds!r}; expected a number above 0")
    if devices is not None and (not devices or not set(devices) <= set(get_args(DeviceKind))):
        raise ConfigError(f"profile: devices={devices!r}; expected some of {', '.join(get_args(DeviceKind))}")
    found = devices_of_rank() if devices is None else tuple(dict.fromkeys(devices))
    if sizes is None:
        return Request(methods, BYTES, ELEMENTS, seconds, found)
    wrong = [n for n in sizes if isinstance(n, bool) or not isinstance(n, int) or n < 1]
    if wrong or not sizes:
        raise ConfigError(f"profile: sizes={list(sizes)!r}; expected elements of tensors, whole numbers above 0")
    cut = regions(sizes, topology)
    moved = {4 * n for n in sizes} | {m.nbytes(n) for m in methods.values() for n in cut}
    return Request(methods, spread(moved), spread(cut), seconds, found)


def regions(sizes: Iterable[int], topology: Topology) -> set[int]:
    """Elements of the payloads that tensors of these sizes are cut into along the routes."""
    cuts = {1, topology.size, topology.local_size, len(topology.nodes), topology.local_size * len(topology.nodes)}
    return {-(-n // cut) for n in sizes for cut in cuts}


def spread(values: Iterable[int]) -> tuple[int, ...]:
    """At most ``POINTS`` of some sizes, the least and the largest among them, evenly by their logarithm."""
    rising = np.array(sorted(set(values)))
    if rising.size <= POINTS:
        return tuple(int(v) for v in rising)
    wanted = np.linspace(math.log(rising[0]), math.log(rising[-1]), POINTS)
    nearest = [int(rising[np.argmin(np.abs(np.log(rising) - w))]) for w in wanted]
    return tuple(sorted(set(nearest)))


def devices_of_rank() -> tuple[DeviceKind, ...]:
    """The CPU, and the GPU if this rank has one; numba's simulator is none."""
    from numba import cuda

    try:
        return ("cpu", "gpu") if cuda.is_available() and not device.simulated() else ("cpu",)
    except Exception:  # a driver that is broken is none
        return ("cpu",)
