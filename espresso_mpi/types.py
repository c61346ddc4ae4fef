"""The values that describe a synchronisation: tensors, steps, routes, strategies, plans. All frozen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeGuard, get_args

import numpy as np

from .errors import ConfigError, PlanError

DeviceKind = Literal["cpu", "gpu"]
Level = Literal["flat", "intra", "inter"]
Op = Literal["allreduce", "reduce_scatter", "allgather", "alltoall"]

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes per element of the element types that can be synchronised."""


@dataclass(frozen=True)
class TensorSpec:
    """What the ranks must agree on about one tensor. ``dtype`` is None for an entry that is ``None``."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None
    device: DeviceKind = "cpu"

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64)) if self.dtype else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the uncompressed tensor."""
        return self.size * ITEMSIZE[self.dtype] if self.dtype else 0

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" if self.dtype else "None"


@dataclass(frozen=True)
class Encode:
    """Compress the current region on a device."""

    device: DeviceKind = "cpu"

    def __str__(self) -> str:
        return f"encode@{self.device}"


@dataclass(frozen=True)
class Decode:
    """Decompress all copies of the current region on a device and average them."""

    device: DeviceKind = "cpu"

    def __str__(self) -> str:
        return f"decode@{self.device}"


@dataclass(frozen=True)
class Collective:
    """One collective operation among the ranks of a level."""

    op: Op
    level: Level

    def __str__(self) -> str:
        return f"{self.op}@{self.level}"


Step = Encode | Decode | Collective


@dataclass(frozen=True)
class Route:
    """How a tensor travels: the steps from a local gradient to the mean on every rank.

    The executor runs it and the planner costs it. Spelled by its steps joined with ``/``, such as
    ``encode@cpu/allgather@flat/decode@cpu``, or by one of the names in ``ROUTES``.
    """

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        _validate(self.steps)

    @classmethod
    def parse(cls, text: str) -> Route:
        """Read a spelling or a name from ``ROUTES``.

        Raises:
            ConfigError: the text is neither, or its steps do not fit together.
        """
        return cls(tuple(_parse_step(part) for part in ROUTES.get(text, text).split("/")))

    @property
    def compressed(self) -> bool:
        """Whether any step compresses."""
        return any(isinstance(step, Encode) for step in self.steps)

    @property
    def sums_payloads(self) -> bool:
        """Whether compressed data is summed on the way, which only linear compressors allow."""
        return any(self._packed_at(i) and s.op == "allreduce" for i, s in enumerate(self.steps) if _moves(s))

    def _packed_at(self, position: int) -> bool:
        coded = [step for step in self.steps[:position] if not _moves(step)]
        return bool(coded) and isinstance(coded[-1], Encode)

    @property
    def levels(self) -> frozenset[str]:
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
"""Names for the usual routes. "packed" carries the payload on through the machine and decodes at the very end; "linear"
sums the payloads themselves, as linear compressors allow."""


def _parse_step(text: str) -> Step:
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


def _moves(step: Step) -> TypeGuard[Collective]:
    return isinstance(step, Collective)


def _validate(steps: tuple[Step, ...]) -> None:
    """Walk the steps and refuse an order in which they cannot be run to a mean on every rank."""
    packed, dealt_out, scattered, summed = False, False, list[str](), set[str]()
    for number, step in enumerate(steps):
        problem = _apply(step, packed, scattered, summed)
        if packed and dealt_out and isinstance(step, Collective) and step.op == "allreduce":
            problem = "payloads that were dealt out or gathered cannot be summed; decode first"
        if problem:
            raise ConfigError(f"route {'/'.join(map(str, steps))!r}: step {number + 1}, {step}: {problem}")
        dealt_out = packed and (dealt_out or (isinstance(step, Collective) and step.op in ("alltoall", "allgather")))
        packed = isinstance(step, Encode) or (packed and not isinstance(step, Decode))
    problem = "ends with compressed data" if packed else "ends with the tensor in pieces" if scattered else ""
    if problem or summed not in ({"flat"}, {"intra", "inter"}):
        problem = problem or f"averages over {sorted(summed) or 'nothing'}; expected flat, or intra and inter"
        raise ConfigError(f"route {'/'.join(map(str, steps))!r} {problem}")


def _apply(step: Step, packed: bool, scattered: list[str], summed: set[str]) -> str:
    """Update what is scattered and summed; return what is wrong with the step, or nothing."""
    if isinstance(step, (Encode, Decode)):
        return (
            "the data is compressed already"
            if packed and isinstance(step, Encode)
            else ("there is nothing to decode" if not packed and isinstance(step, Decode) else "")
        )
    if step.op == "reduce_scatter" and packed:
        return "compressed data cannot be scattered by a sum; decode first, or use allreduce, alltoall or allgather"
    if step.op == "alltoall" and not packed:
        return "moves compressed data; encode first, or use reduce_scatter"
    if step.op == "allgather" and step.level in scattered:
        return "" if scattered.pop() == step.level else "another level was scattered later and must be gathered first"
    if step.op == "allgather" and not packed:
        return f"nothing is scattered at level {step.level}"
    if step.level in summed:
        return f"the level {step.level} is averaged twice"
    summed.add(step.level)
    if step.op in ("reduce_scatter", "alltoall"):
        scattered.append(step.level)
    return ""


@dataclass(frozen=True)
class Strategy:
    """How one tensor is synchronised: a compressor or its spelling (``none`` for dense), a route or its spelling."""

    compressor: str
    route: Route

    def __post_init__(self) -> None:
        if not isinstance(self.compressor, str):
            object.__setattr__(self, "compressor", str(self.compressor))
        if isinstance(self.route, str):
            object.__setattr__(self, "route", Route.parse(self.route))
        if self.route.compressed != (self.compressor != "none"):
            raise ConfigError(
                f"compressor {self.compressor!r} does not go with route {str(self.route)!r}; a route that encodes "
                f"needs a compressor and one that does not needs 'none'"
            )


@dataclass(frozen=True)
class Plan:
    """A strategy for every tensor by name; ``default`` (if any) serves names that are not listed.

    Raises (from ``strategy``):
        PlanError: the plan does not know the tensor.
    """

    strategies: Mapping[str, Strategy] = field(default_factory=dict)
    default: Strategy | None = None

    def __post_init__(self) -> None:
        for name, strategy in [*self.strategies.items(), ("default", self.default)]:
            if not isinstance(strategy, Strategy) and (name != "default" or strategy is not None):
                raise PlanError(
                    f"plan: {name!r}: got {strategy!r}; expected a Strategy such as Strategy('onebit', 'flat-alltoall')"
                )

    def strategy(self, name: str) -> Strategy:
        """The strategy of a tensor."""
        found = self.strategies.get(name, self.default)
        if found is None:
            raise PlanError(
                f"the plan has no strategy for tensor {name!r}; it knows {', '.join(self.strategies) or 'none'}"
            )
        return found

    @property
    def digest(self) -> str:
        """SHA-256 of the plan's content: equal plans have equal digests on every rank."""
        rows = {name: [s.compressor, str(s.route)] for name, s in self.strategies.items()}
        default = [self.default.compressor, str(self.default.route)] if self.default else None
        return hashlib.sha256(json.dumps([rows, default], sort_keys=True).encode()).hexdigest()
