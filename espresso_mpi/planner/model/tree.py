"""The decision tree of Espresso (EuroSys'23): every route along which one tensor can travel.

A route says whether the tensor is compressed, on which device every encode and decode runs, whether communication is
flat or hierarchical, which collectives carry it, and between which of them the encodes and decodes stand.
docs/routes.md has the grammar and its counts. Each function here is one of its rules, and yields the steps from a place
in the tree to the end. The rules below the root are named after what the rest of the route begins with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

from espresso_mpi.compressors.base import Compressor
from espresso_mpi.errors import ConfigError
from espresso_mpi.types import CLOSING, ROUTES, Collective, Decode, DeviceKind, Encode, Level, Op, Route, RouteStep

Steps = tuple[RouteStep, ...]

DENSE_FIRST: tuple[Op, ...] = ("reduce_scatter", "reduce")
PACKED_FIRST: tuple[Op, ...] = ("alltoall", "gather")
"""What divisible communication begins with: of dense data, whose sums the linear branch also takes of payloads, and of
payloads that are summed when they are decoded."""


def routes(devices: Sequence[DeviceKind] = ("cpu", "gpu"), linear: bool = False) -> tuple[Route, ...]:
    """All routes of the decision tree: 4341 for two kinds of devices, 174 for one; all different.

    Args:
        devices: where encodes and decodes may run.
        linear: add the routes that sum payloads, which only linear compressors can go along: 14017 in all for two
            kinds of devices, 433 for one.

    Raises:
        ConfigError: an unknown device, one named twice, or none.

    Example:
        >>> len(espresso_mpi.planner.routes(("cpu",)))
        174
    """
    given = tuple(devices)
    if not given or len(set(given)) < len(given) or not set(given) <= set(get_args(DeviceKind)):
        raise ConfigError(
            f"devices={devices!r}; expected one or both of {', '.join(map(repr, get_args(DeviceKind)))}, each once"
        )
    return _routes(given, bool(linear))


@lru_cache(maxsize=8)
def _routes(devices: tuple[DeviceKind, ...], linear: bool) -> tuple[Route, ...]:
    tree = _Tree(devices, linear)
    return tuple(Route(steps) for steps in (*tree.flat(), *tree.hierarchical()))


def named_routes(method: Compressor | None, hierarchical: bool) -> tuple[Route, ...]:
    """The routes of ``ROUTES`` that payloads of a method can take, in their order, with encodes on the host.

    Args:
        method: None: dense data.
        hierarchical: whether several nodes have several ranks each. Elsewhere only flat routes are given: a level
            of one rank moves nothing.
    """
    every = [(name, Route.parse(name)) for name in ROUTES]
    fitting = [route for name, route in every if hierarchical or name.partition("-")[0] == "flat"]
    if method is None:
        return tuple(route for route in fitting if not route.compressed)
    return tuple(route for route in fitting if route.compressed and (method.linear or not route.sums_payloads))


@dataclass(frozen=True)
class _Tree:
    """The rules. ``single``: the payload is one contribution, not several that only a decode can sum."""

    devices: tuple[DeviceKind, ...]
    linear: bool

    def flat(self) -> Iterator[Steps]:
        """All ranks as one group."""
        yield (Collective("allreduce", "flat"),)
        for first in DENSE_FIRST:
            yield from _after(Collective(first, "flat"), then=self.second("flat", first))
        for encode in self.encodes():
            for whole in self.indivisible():
                yield from ((encode, Collective(whole, "flat"), decode) for decode in self.decodes())
            for first in self.packed_first():
                yield from _after(encode, Collective(first, "flat"), then=self.second_packed("flat", first))

    def hierarchical(self) -> Iterator[Steps]:
        """Inside the nodes, between them, and inside again."""
        for first in DENSE_FIRST:
            yield from _after(Collective(first, "intra"), then=self.between(first))
        for encode in self.encodes():
            for first in self.packed_first():
                single = first in DENSE_FIRST
                yield from _after(encode, Collective(first, "intra"), then=self.between_packed(first, single))
                for decode in self.decodes():
                    yield from _after(encode, Collective(first, "intra"), decode, then=self.between(first))

    def between(self, intra: Op) -> Iterator[Steps]:
        """From the nodes' dense sums on; ``intra``: what led there and is still to be closed."""
        yield from self.between_dense(intra)
        for encode in self.encodes():
            yield from _after(encode, then=self.between_packed(intra, True))

    def between_dense(self, intra: Op) -> Iterator[Steps]:
        """Between nodes, beginning with dense data (T3)."""
        yield from _after(Collective("allreduce", "inter"), then=self.second("intra", intra))
        for first in DENSE_FIRST:
            yield from _after(Collective(first, "inter"), then=self.closing(first, intra))

    def between_packed(self, intra: Op, single: bool) -> Iterator[Steps]:
        """Between nodes, beginning with payloads (T4)."""
        for whole in self.indivisible(single):
            yield from _after(Collective(whole, "inter"), then=self.second_packed("intra", intra))
        for first in self.packed_first(single):
            closing = Collective(CLOSING[first], "inter")
            yield from _after(Collective(first, "inter"), closing, then=self.second_packed("intra", intra))
            for decode in self.decodes():
                yield from _after(Collective(first, "inter"), decode, then=self.closing(first, intra))

    def closing(self, inter: Op, intra: Op) -> Iterator[Steps]:
        """From the second step between nodes on, beginning with dense data (T5)."""
        second = Collective(CLOSING[inter], "inter")
        yield from _after(second, then=self.second("intra", intra))
        for encode in self.encodes():
            yield from _after(encode, second, then=self.second_packed("intra", intra))

    def second(self, level: Level, first: Op) -> Iterator[Steps]:
        """The second of two steps at the last level, beginning with dense data (T1)."""
        second = Collective(CLOSING[first], level)
        yield (second,)
        for encode in self.encodes():
            yield from ((encode, second, decode) for decode in self.decodes())

    def second_packed(self, level: Level, first: Op) -> Iterator[Steps]:
        """The second of two steps at the last level, beginning with payloads (T2)."""
        for decode in self.decodes():
            yield (Collective(CLOSING[first], level), decode)
            yield from _after(decode, then=self.second(level, first))

    # --- what there is to choose from ---

    def encodes(self) -> Iterator[Encode]:
        return map(Encode, self.devices)

    def decodes(self) -> Iterator[Decode]:
        return map(Decode, self.devices)

    def indivisible(self, single: bool = True) -> tuple[Op, ...]:
        """Collectives that bring payloads from all to all."""
        return ("allgather", "allreduce") if self.linear and single else ("allgather",)

    def packed_first(self, single: bool = True) -> tuple[Op, ...]:
        """Collectives that divisible communication of payloads begins with."""
        return PACKED_FIRST + DENSE_FIRST if self.linear and single else PACKED_FIRST


def _after(*first: RouteStep, then: Iterator[Steps]) -> Iterator[Steps]:
    """The steps, and after them each of the possible continuations."""
    return ((*first, *rest) for rest in then)
