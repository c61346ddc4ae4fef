"""The options of a session: checked once, and described for the comparison between ranks."""

from __future__ import annotations

import dataclasses
import numbers
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from . import compressors
from .collectives.data.layout import Topology
from .collectives.messages.agreement import fingerprint
from .collectives.messages.connection import MESSAGE_MAX
from .collectives.messages.switches import by_tables, device_aware, single_copy
from .collectives.messages.transport import MESSAGE_BYTES, TransportSettings
from .collectives.program import check_payloads
from .errors import ConfigError, EspressoError
from .feedback import AUTO, Feedback
from .tuning import Tuning
from .types import ROUTES, Plan, Route, Strategy, TensorSpec

DEFAULT_TIMEOUT = 300.0
DEFAULT_SEGMENT = 1 << 20

_DEBUG = "ESPRESSO_DEBUG"

_MANY = 1 << 20
"""Number of elements with which options are checked; later, each tensor is checked with its own size."""


POOR_UNDER_ADAM = (
    "onebit", "onebit_sgd", "signsgd", "signum", "topk", "topk_sampled", "topk_chunked", "threshold", "randomk", "dgc",
    "count_sketch", "topk_in_chunks", "dct_topk", "powersgd", "acpsgd", "int2", "drive",
)  # fmt: skip
"""Compressors of gradients whose loss stays clearly more than 1 % above that of fp32 under optimizers that divide by
the root of the second moment. Measured under AdamW (docs/time-to-accuracy.md, docs/auto.md): ``onebit`` +10 to +22 %,
``topk`` at 1 % +17 to +37 %, ``powersgd:rank=4`` +2 to +9 %, ``int2`` +1 to +4 %, ``drive`` +4 %. The others select or
round in the same way.
"""

POOR_UNDER_MOMENTUM = (
    "onebit", "onebit_sgd", "topk", "topk_sampled", "topk_chunked", "threshold", "randomk", "count_sketch",
    "topk_in_chunks", "dct_topk", "powersgd", "acpsgd",
)  # fmt: skip
"""The same under SGD with momentum. Measured: ``onebit`` +4 to +22 %, ``topk`` at 1 % +7 to +21 %, ``powersgd:rank=4``
+1 to +4 %; ``int2`` 0 %. ``dgc`` and ``signum`` have a momentum of their own.
"""


@dataclass(frozen=True)
class Options:
    """See ``Session``."""

    compressor: str = "none"
    route: Route | None = None
    plan: Plan | None = None
    seed: int = 0
    min_bytes: int = 16384
    dense: tuple[str, ...] = ()
    dense_steps: int = 0
    timeout: float = DEFAULT_TIMEOUT
    feedback: Feedback = AUTO
    nonfinite: str = "raise"
    window_bytes: int = 4 << 20
    message_bytes: int = MESSAGE_BYTES
    segment_bytes: int = DEFAULT_SEGMENT
    fuse_bytes: int | None = None
    nodes: tuple[tuple[int, ...], ...] | None = None
    device_aware: bool | None = None
    by_tables: bool = True
    single_copy: bool = True
    tuning: Tuning | None = None
    debug: bool = False

    @classmethod
    def checked(cls, **given: Any) -> tuple[Options, str | None]:
        """The options and their problems: a rank with invalid options still has to report them to the others."""
        good: dict[str, Any] = {}
        problems: list[str] = []
        for key, read in (
            ("device_aware", device_aware),
            ("by_tables", by_tables),
            ("single_copy", single_copy),
        ):  # from the environment
            try:
                good[key] = read()
            except ConfigError as error:
                problems.append(str(error))
        for key, value in given.items():
            try:
                good[key] = _CHECKS[key](value)
            except EspressoError as error:
                problems.append(str(error))
            except Exception as error:  # a user's compressor may raise anything; the other ranks must get it
                problems.append(f"{key}={value!r}: {type(error).__name__}: {error}")
        options = cls(**good)
        if not problems:
            problems = options.conflicts()
        return options, "; ".join(problems) or None

    def conflicts(self) -> list[str]:
        """The conflicts between options that are valid each by itself."""
        if self.tuning is not None and (self.compressor != "none" or self.route is not None):
            return [
                "plan='auto' chooses compressor and route for every tensor; pass compressors=[...], which it may use"
            ]
        if self.tuning is not None and self.feedback.momentum != 1:
            return [
                f"feedback={str(self.feedback)!r} gives no plain mean; with plan='auto' some tensors would, some not"
            ]
        if self.plan is not None and (self.compressor != "none" or self.route is not None):
            return [
                "plan= already says compressor and route for every tensor; pass either plan, or compressor and route"
            ]
        if self.dense or self.dense_steps:
            option = f"dense={list(self.dense)!r}" if self.dense else f"dense_steps={self.dense_steps}"
            if self.plan is not None or self.tuning is not None:
                return [f"{option}: a plan says how each tensor travels; pass it to Session.follow after dense steps"]
            if not self._may_stay_dense:
                return [
                    f"{option} with compressor={self.compressor!r}, feedback={str(self.feedback)!r}: its result is no "
                    f"plain mean of the gradients, so dense tensors would get another scale; leave the option out"
                ]
        try:
            if self.route is not None:
                Strategy(self.compressor, self.route)
            for strategy in self._strategies():
                check_payloads(strategy.route, compressors.get(strategy.compressor))
                self.feedback.resolved(compressors.get(strategy.compressor), _MANY)
        except ConfigError as error:
            return [str(error)]
        except Exception as error:  # as in ``checked``
            return [f"compressor={self.compressor!r}: {type(error).__name__}: {error}"]
        return []

    def _strategies(self) -> list[Strategy]:
        """The compressed strategies that were named."""
        plan = self.plan
        named = [*plan.strategies.values(), plan.default] if plan else []
        if self.compressor != "none":
            named.append(Strategy(self.compressor, self.route or Route.parse("flat-allgather")))
        return [strategy for strategy in named if strategy is not None and strategy.compressor != "none"]

    def transport(self) -> TransportSettings:
        """The settings of the transport."""
        return TransportSettings(
            self.timeout, self.window_bytes, self.message_bytes, self.nodes, self.device_aware, self.by_tables,
            self.single_copy,
        )  # fmt: skip

    @property
    def fusion(self) -> int | None:
        """Bytes below which dense tensors share a buffer; None: to be measured."""
        return self.plan.fuse_bytes if self.fuse_bytes is None and self.plan is not None else self.fuse_bytes

    def strategy(self, spec: TensorSpec, topology: Topology) -> Strategy:
        """The strategy of a tensor without a plan.

        A single rank compresses nothing, unless the compressor does more than average.
        """
        if self.compressor == "none" or (self._may_stay_dense and self._is_dense(spec, topology)):
            wanted = self.route if self.compressor == "none" else None
            return dense_strategy(topology) if wanted is None else _dense(wanted)
        summed = compressors.get(self.compressor).common
        route = self.route or Route.parse(default_route(topology, compressed=True, summed=summed)).on(spec.device)
        return Strategy(self.compressor, route)

    def plan_for(self, spec: TensorSpec) -> Plan | None:
        """The plan that has a strategy for a tensor; None: it has the one without a plan.

        A plan of ``plan="auto"`` may compress tensors that are not known yet. Small ones may be no gradients.
        """
        plan = self.plan
        if plan is None or self.tuning is None or spec.name in plan.strategies or spec.nbytes >= self.min_bytes:
            return plan
        return None

    def _is_dense(self, spec: TensorSpec, topology: Topology) -> bool:
        """Whether a tensor is sent uncompressed in a session that compresses."""
        return topology.size == 1 or self.stays_dense(spec.name, spec.nbytes)

    def stays_dense(self, name: str, nbytes: int) -> bool:
        """Whether ``min_bytes`` or ``dense`` says so; a pattern for ``w`` is one for the progress of ``w``, too."""
        names = name, name.removeprefix("DiLoCo ")
        return nbytes < self.min_bytes or any(fnmatchcase(one, pattern) for pattern in self.dense for one in names)

    @property
    def _may_stay_dense(self) -> bool:
        """Whether a compressed tensor becomes the plain mean, as a dense one does."""
        averages = self.compressor == "none" or compressors.get(self.compressor).averages
        return averages and self.feedback.momentum == 1

    def described(self) -> dict[str, Any]:
        """Everything that must be equal on all ranks, as JSON values."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        route, plan = self.route, self.plan
        texts = {"route": str(route) if route else None, "feedback": str(self.feedback)}
        texts["tuning"] = str(self.tuning) if self.tuning else None
        return {**values, **texts, "plan": _told(plan) if plan else None}


def _told(plan: Plan) -> str:
    """A short text for a plan; different plans have different texts."""
    made = plan.made_for
    if made is None:
        return plan.digest
    sizes = fingerprint(str(made)).hex()[:12]
    return (
        f"{plan.digest}, made for {len(made.tensors)} tensors ({sizes}) on {made.nodes} nodes of "
        f"{made.ranks_per_node} ranks"
    )


def dense_strategy(topology: Topology) -> Strategy:
    """The strategy of dense tensors in a session that compresses others."""
    return _dense(default_route(topology, compressed=False))


@lru_cache(maxsize=256)
def _dense(route: Route | str) -> Strategy:
    """The dense strategy of a route: one object for all tensors, so that comparisons are fast."""
    return Strategy("none", Route.parse(route) if isinstance(route, str) else route)


def default_route(topology: Topology, compressed: bool, summed: bool = False) -> str:
    """The name of the default route; docs/routes.md has the measurements behind it.

    The route is hierarchical if there are several nodes of which one has several ranks, else flat. Compressors with a
    common header (``summed``) have their payloads summed. Other payloads are gathered on two nodes or two ranks: this
    sends as many bytes as an alltoall, with one exchange and one encode less, so with less error. With more nodes, an
    alltoall is used, and the payload travels on inside the node: each rank then decodes once, which costs less than
    moving the decoded tensor.

    Payloads of 16-bit floats are not summed by default. Between nodes this is not faster, and the sums are rounded and,
    for float16, clipped at 65504, which no residual compensates.
    """
    hierarchical = len(topology.nodes) > 1 and topology.size > len(topology.nodes)
    level, parties = ("hierarchical", len(topology.nodes)) if hierarchical else ("flat", topology.size)
    if not compressed:
        return level
    if summed:
        return f"{level}-linear"
    if parties <= 2:
        return f"{level}-allgather"
    return f"{level}-alltoall-packed" if hierarchical else f"{level}-alltoall"


def _compressor(value: Any) -> str:
    return "none" if value in (None, "none") else str(compressors.get(value))


def _route(value: Any) -> Route | None:
    if value is None or isinstance(value, Route):
        return value
    if not isinstance(value, str):
        raise ConfigError(f"route: got {type(value).__name__}; expected one of {', '.join(ROUTES)}, or a spec")
    return Route.parse(value)


def _plan(value: Any) -> Plan | None:
    if value is None or isinstance(value, Plan):
        return value
    if isinstance(value, (str, os.PathLike)):
        from .planner.planfile import load

        return load(value)
    raise ConfigError(f"plan: got {type(value).__name__}; expected an espresso_mpi.Plan, the path of one, or 'auto'")


def _tuning(given: tuple[bool, Any, Any, Any]) -> Tuning | None:
    """``given``: whether plan="auto", the settings, the allowed compressors, and the accuracy."""
    auto, settings, names, accuracy = given
    if not auto:
        options = {"compressors": names, "tuning": settings, "accuracy": accuracy}
        for what in (name for name, value in options.items() if value is not None):
            raise ConfigError(f"{what}= goes with plan='auto'; pass that, or compressor='...' for all tensors")
        return None
    if settings is not None and not isinstance(settings, Tuning):
        raise ConfigError(f"tuning={settings!r}; expected an espresso_mpi.Tuning")
    settings = settings or Tuning()
    settings = settings if accuracy is None else dataclasses.replace(settings, accuracy=accuracy)
    if names is None:
        return settings
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigError(f"compressors={names!r}; expected a list of specs such as ['fp16', 'int8']")
    return dataclasses.replace(settings, compressors=tuple(names))


def _nodes(value: Any) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    try:
        return tuple(tuple(operator.index(rank) for rank in group) for group in value)
    except (TypeError, ValueError):
        raise ConfigError(f"nodes={value!r}; expected lists of ranks, such as [[0, 1], [2, 3]]") from None


def _fuse(value: Any) -> int | None:
    if value is None:
        return None
    return _number("fuse_bytes", True, 0, 2**62, "a number of bytes, 0 to keep tensors apart, or None to measure")(
        value
    )


def _debug(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value is not None:
        raise ConfigError(f"debug={value!r}; expected True, False, or None for what {_DEBUG} says")
    setting = os.environ.get(_DEBUG, "0")
    if setting not in ("0", "1"):
        raise ConfigError(f"{_DEBUG}={setting!r}; expected 1 (tensors are checksummed) or 0 (as if unset)")
    return setting == "1"


def _patterns(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value):
        raise ConfigError(f"dense={value!r}; expected a list of names or patterns, such as ['*embedding*', 'head.*']")
    return tuple(value)


def _number(name: str, whole: bool, low: float, high: float, what: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        kind: Any = numbers.Integral if whole else numbers.Real
        if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
            raise ConfigError(f"{name}={value!r}; expected {what}")
        return int(value) if whole else float(value)

    return check


def _choice(name: str, *allowed: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not any(value is a or (isinstance(a, str) and value == a) for a in allowed):
            raise ConfigError(f"{name}={value!r}; expected one of {', '.join(map(repr, allowed))}")
        return value

    return check


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "compressor": _compressor,
    "route": _route,
    "plan": _plan,
    "seed": _number("seed", True, -(2**63), 2**63 - 1, "a whole number of 64 bits"),
    "min_bytes": _number("min_bytes", True, 0, 2**62, "a number of bytes, 0 or more"),
    "dense": _patterns,
    "dense_steps": _number("dense_steps", True, 0, 2**62, "a number of steps, 0 or more"),
    "timeout": _number("timeout", False, 1e-3, 1e9, "seconds above 0"),
    "feedback": Feedback.of,
    "nonfinite": _choice("nonfinite", "raise", "skip", "skip_all", "propagate"),
    "window_bytes": _number("window_bytes", True, 0, 1 << 32, "a number of bytes from 0 (no window) to 4 GiB"),
    "message_bytes": _number("message_bytes", True, 1, MESSAGE_MAX, f"a number of bytes from 1 to {MESSAGE_MAX}"),
    "segment_bytes": _number("segment_bytes", True, 0, 2**62, "a number of bytes, 0 for tensors in one piece"),
    "fuse_bytes": _fuse,
    "nodes": _nodes,
    "tuning": _tuning,
    "debug": _debug,
}
