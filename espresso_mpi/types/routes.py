"""Routes and their steps. All values are frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, TypeGuard, get_args

from ..errors import ConfigError
from .tensors import DeviceKind

Level = Literal["flat", "intra", "inter"]
Op = Literal["allreduce", "reduce_scatter", "allgather", "alltoall", "reduce", "gather", "broadcast"]

CLOSING: dict[str, Op] = {
    "reduce_scatter": "allgather",
    "alltoall": "allgather",
    "reduce": "broadcast",
    "gather": "broadcast",
}
"""Divisible communication: operations that leave a part of the data on each rank, and those that join the parts."""

SUMS = frozenset({"allreduce", "reduce_scatter", "reduce"})
"""Operations that sum dense data, or the payloads of linear compressors."""


@dataclass(frozen=True)
class Encode:
    """Compress the current region on a device.

    Example:
        >>> str(espresso_mpi.types.Encode("cuda"))
        'encode@cuda'
    """

    device: DeviceKind = "cpu"

    def __str__(self) -> str:
        return f"encode@{self.device}"


@dataclass(frozen=True)
class Decode:
    """Decompress all copies of the current region on a device, and average them.

    Example:
        >>> str(espresso_mpi.types.Decode())
        'decode@cpu'
    """

    device: DeviceKind = "cpu"

    def __str__(self) -> str:
        return f"decode@{self.device}"


@dataclass(frozen=True)
class Collective:
    """One collective operation among the ranks of a level.

    Example:
        >>> from espresso_mpi.types import Collective, Decode, Encode
        >>> str(espresso_mpi.Route((Encode(), Collective("allgather", "flat"), Decode())))
        'encode@cpu/allgather@flat/decode@cpu'
    """

    op: Op
    level: Level

    def __str__(self) -> str:
        return f"{self.op}@{self.level}"


RouteStep = Encode | Decode | Collective


@dataclass(frozen=True)
class Route:
    """How a tensor travels: the steps from a local gradient to the mean on every rank.

    The executor runs it, and the planner predicts its cost. Its spec is its steps joined with ``/``, such as
    ``encode@cpu/allgather@flat/decode@cpu``, or one of the names in ``ROUTES``.

    Example:
        >>> str(espresso_mpi.Route.parse("flat-allgather"))
        'encode@cpu/allgather@flat/decode@cpu'
    """

    steps: tuple[RouteStep, ...]

    def __post_init__(self) -> None:
        _validate(self.steps)

    @classmethod
    def parse(cls, text: str) -> Route:
        """Read a spec or a name from ``ROUTES``.

        Raises:
            ConfigError: the text is neither, or its steps cannot follow each other.
        """
        return _parsed(ROUTES.get(text, text))

    @property
    def compressed(self) -> bool:
        """Whether any step compresses."""
        return any(isinstance(step, Encode) for step in self.steps)

    @property
    def sums_payloads(self) -> bool:
        """Whether payloads are summed, which only linear compressors allow."""
        return any(self._packed_at(i) and s.op in SUMS for i, s in enumerate(self.steps) if _moves(s))

    @property
    def scatters_sums(self) -> bool:
        """Whether sums of payloads are left on some ranks only, not on all."""
        moves = [(i, s) for i, s in enumerate(self.steps) if isinstance(s, Collective)]
        return any(self._packed_at(i) and move.op in SUMS and move.op != "allreduce" for i, move in moves)

    def _packed_at(self, position: int) -> bool:
        coded = [step for step in self.steps[:position] if not _moves(step)]
        return bool(coded) and isinstance(coded[-1], Encode)

    @property
    def levels(self) -> frozenset[Level]:
        """The levels on which data moves."""
        return frozenset(step.level for step in self.steps if isinstance(step, Collective))

    def on(self, device: DeviceKind) -> Route:
        """The same route with every encode and decode on ``device``."""
        return Route(tuple(s if isinstance(s, Collective) else type(s)(device) for s in self.steps))

    def __str__(self) -> str:
        return "/".join(map(str, self.steps))


ROUTES: dict[str, str] = {
    "flat": "allreduce@flat",
    "hierarchical": "reduce_scatter@intra/allreduce@inter/allgather@intra",
    "flat-allgather": "encode@cpu/allgather@flat/decode@cpu",
    "flat-alltoall": "encode@cpu/alltoall@flat/decode@cpu/encode@cpu/allgather@flat/decode@cpu",
    "hierarchical-allgather": "reduce_scatter@intra/encode@cpu/allgather@inter/decode@cpu/allgather@intra",
    "hierarchical-alltoall": "reduce_scatter@intra/encode@cpu/alltoall@inter/decode@cpu/encode@cpu/allgather@inter"
    "/decode@cpu/allgather@intra",
    "hierarchical-alltoall-packed": "reduce_scatter@intra/encode@cpu/alltoall@inter/decode@cpu/encode@cpu"
    "/allgather@inter/allgather@intra/decode@cpu",
    "flat-linear": "encode@cpu/allreduce@flat/decode@cpu",
    "hierarchical-linear": "reduce_scatter@intra/encode@cpu/allreduce@inter/decode@cpu/allgather@intra",
}
"""Names of common routes. "packed" sends the payload through the node and decodes at the end; "linear" sums payloads,
which linear compressors allow."""


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Route:
    """Cached, because parsing takes 50 us, and models have thousands of tensors with the same route."""
    return Route(tuple(_parse_step(part) for part in text.split("/")))


def _parse_step(text: str) -> RouteStep:
    verb, _, where = text.strip().partition("@")
    if verb in ("encode", "decode") and where in get_args(DeviceKind):
        return (Encode if verb == "encode" else Decode)(where)  # type: ignore[arg-type]
    if verb in get_args(Op) and where in get_args(Level):
        return Collective(verb, where)  # type: ignore[arg-type]
    raise ConfigError(
        f"route: cannot read the step {text!r}; expected encode@ or decode@ with {' or '.join(get_args(DeviceKind))}, "
        f"or one of {', '.join(get_args(Op))} with @{', @'.join(get_args(Level))}; or the name of a route: "
        f"{', '.join(ROUTES)}"
    )


def _moves(step: RouteStep) -> TypeGuard[Collective]:
    return isinstance(step, Collective)


def _validate(steps: tuple[RouteStep, ...]) -> None:
    """Refuse steps that do not lead to the mean on every rank."""
    walk = _Walk()
    for number, step in enumerate(steps):
        problem = walk.problem_with(step)
        if problem:
            raise ConfigError(f"route {'/'.join(map(str, steps))!r}: step {number + 1}, {step}: {problem}")
        walk.take(step)
    problem = walk.problem_at_the_end()
    if problem:
        raise ConfigError(f"route {'/'.join(map(str, steps))!r} {problem}")


@dataclass
class _Walk:
    """The state of the data after the first steps of a route.

    Attributes:
        packed: the data is compressed.
        multiplied: a rank has several payloads of the same region, which only a decode can sum.
        opened: (level, operation) of divisible communication that is still to be closed, the last one last.
        summed: levels that were averaged over.
    """

    packed: bool = False
    multiplied: bool = False
    opened: list[tuple[str, str]] = field(default_factory=list)
    summed: set[str] = field(default_factory=set)

    def problem_with(self, step: RouteStep) -> str:
        """The problem of a step at this place, or an empty text."""
        if isinstance(step, Encode):
            return "the data is compressed already" if self.packed else ""
        if isinstance(step, Decode):
            return "" if self.packed else "there is nothing to decode"
        if step.op in CLOSING.values() and step.level in [level for level, _ in self.opened]:
            return self._problem_with_closing(step)
        return self._problem_with_averaging(step)

    def _problem_with_closing(self, step: Collective) -> str:
        level, op = self.opened[-1]
        if level != step.level:
            return f"another level was scattered later and must be gathered first, by {CLOSING[op]}@{level}"
        return "" if CLOSING[op] == step.op else f"does not go with {op}@{level}; use {CLOSING[op]}@{level}"

    def _problem_with_averaging(self, step: Collective) -> str:
        if step.op == "broadcast":
            return f"nothing was reduced or gathered to one rank at level {step.level}"
        if step.op in ("alltoall", "gather") and not self.packed:
            dense = "reduce_scatter" if step.op == "alltoall" else "reduce"
            return f"moves compressed data; encode first, or use {dense}"
        if step.op == "allgather" and not self.packed:
            return f"nothing is scattered at level {step.level}"
        if step.op in SUMS and self.multiplied:
            return "payloads that were dealt out or gathered cannot be summed; decode first"
        if step.level in self.summed:
            closing = [f"{CLOSING[op]}@{level} must follow {op}@{level}" for level, op in self.opened]
            return "; ".join([f"the level {step.level} is averaged twice", *closing[-1:]])
        return ""

    def take(self, step: RouteStep) -> None:
        """Advance by a step without a problem."""
        if not isinstance(step, Collective):
            self.packed, self.multiplied = isinstance(step, Encode), False
        elif step.level in [level for level, _ in self.opened]:
            self.opened.pop()
        else:
            self.summed.add(step.level)
            self.multiplied |= step.op not in SUMS
            if step.op in CLOSING:
                self.opened.append((step.level, step.op))

    def problem_at_the_end(self) -> str:
        """Why the tensor is not the mean on every rank, or an empty text."""
        if self.packed:
            return "ends with compressed data"
        if self.opened:
            in_pieces = CLOSING[self.opened[-1][1]] == "allgather"
            return "ends with the tensor in pieces" if in_pieces else "ends with the tensor on one rank alone"
        if self.summed in ({"flat"}, {"intra", "inter"}):
            return ""
        return f"averages over {sorted(self.summed) or 'nothing'}; expected flat, or intra and inter"
