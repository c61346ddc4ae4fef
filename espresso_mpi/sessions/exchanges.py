"""What collectives do, as the engine takes it, and the checks of their arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import compressors
from ..arrays.buffers import Gradient
from ..collectives.data.layout import Topology
from ..collectives.messages.agreement import fingerprint
from ..collectives.messages.mpi_reduction import reduce_by_mpi
from ..collectives.messages.transport import Transport
from ..collectives.program import check_route
from ..collectives.progress import Progress
from ..engine.batches import Batch, Item
from ..engine.calls import Exchange
from ..errors import ConfigError
from ..feedback import NO_FEEDBACK, Feedback
from ..options import Options
from ..types import Route, TensorSpec

_MPI = ("sum", "prod", "min", "max", "land", "lor", "lxor", "band", "bor", "bxor")
_HALVES = ("float16", "bfloat16")


def bytes_of(gradient: Gradient) -> Any:
    return gradient.array.view(np.uint8)


def exchange_of(said: list[Any], gradients: Sequence[Gradient], progress: Callable[[Transport], Progress]) -> Exchange:
    return Exchange(said, tuple((g.spec.name, str(g.spec), g.spec.device) for g in gradients), progress)


def reduction_of(
    spec: TensorSpec,
    op: str,
    topology: Topology,
    name: str,
    compressor: str = "none",
    route: str | Route | None = None,
    feedback: Feedback | str | bool = "none",
    root: int | None = None,
) -> Batch:
    """A sum or a mean of floating-point numbers by a route.

    Args:
        root: of a reduce, which takes the way of an allreduce.
    """
    options, problem = Options.checked(compressor=compressor, route=route, feedback=feedback, min_bytes=0)
    if problem:
        raise ConfigError(f"allreduce: {problem}")
    named = replace(spec, name=f"allreduce {name}".strip())
    strategy = options.strategy(named, topology)
    method = None if strategy.compressor == "none" else compressors.get(strategy.compressor)
    check_route(strategy.route, topology, method)
    shaped = None if method is None else method.shaped(spec.shape)
    how = NO_FEEDBACK if shaped is None else options.feedback.resolved(shaped, spec.size)
    if how != NO_FEEDBACK and not name:
        raise ConfigError(f"allreduce: feedback={str(how)!r} without a name; the residual is kept under it: pass name=")
    item = Item(0, named, strategy, shaped, how, total=op == "sum")
    said = [op, str(compressor), str(strategy.route), str(how), root]
    digest = fingerprint([said, named.name, list(spec.shape), spec.dtype, spec.device])
    return Batch((named,), (item,) if spec.size else (), digest, exact=method is None)


def by_mpi(kind: str, gradient: Gradient, op: str, root: int | None) -> Exchange:
    """A reduction by MPI's own operator. MPI has no 16-bit floating-point numbers: these go through float32."""
    spec = gradient.spec
    if op == "mean":
        raise ConfigError(f"{kind}: op='mean' of {spec.dtype}; expected floating-point numbers; use op='sum'")
    if op not in _MPI:
        raise ConfigError(f"{kind}: op={op!r}; expected mean or one of {', '.join(_MPI)}")
    if spec.device != "cpu":
        raise ConfigError(
            f"{kind}: op={op!r} of an array on the GPU; expected mean or sum there; pass a copy in host memory"
        )
    if spec.dtype in _HALVES and op != "sum":
        raise ConfigError(f"{kind}: op={op!r} of {spec.dtype}; MPI has no such type; pass x.astype('float32')")
    bitwise, floating = op in ("band", "bor", "bxor"), str(spec.dtype).startswith(("float", "complex"))
    ordered = op in ("min", "max", "land", "lor", "lxor")
    if (bitwise and floating) or (ordered and str(spec.dtype).startswith("complex")):
        raise ConfigError(f"{kind}: op={op!r} of {spec.dtype}; MPI has no such operator; use mean, sum or prod")
    op = {"sum": "lor", "max": "lor", "prod": "land", "min": "land"}.get(op, op) if spec.dtype == "bool" else op
    return exchange_of(
        [kind, op, root], [gradient], lambda transport: reduce_by_mpi(transport, gradient.array, op, root)
    )


def require_plain(kind: str, op: str, compressor: str, route: Any) -> None:
    if compressor != "none" or route is not None:
        raise ConfigError(
            f"{kind}: compressor={compressor!r}, route={route!r} with op={op!r}; only mean and sum of floating-point "
            f"numbers are compressed or take a route; leave them out"
        )


def shape_of(kind: str, x: Any) -> tuple[int, ...]:
    shape = tuple(getattr(x, "shape", ()))
    if not shape:
        raise ConfigError(f"{kind}: got {type(x).__name__} without dimensions; expected an array of at least one")
    return shape


def require_size(kind: str, spec: TensorSpec, size: int) -> None:
    if spec.size != size:
        raise ConfigError(f"{kind}: out has {spec.size} elements; expected {size}")


def rows_of(
    rows: int, splits: Sequence[int] | None, received: Sequence[int] | None, ranks: int
) -> tuple[list[int], list[int]]:
    """Rows to and from each rank."""
    if (splits is None) != (received is None):
        raise ConfigError("alltoall: splits or received without the other; pass both, or none for equal parts")
    if splits is None or received is None:
        if rows % ranks:
            raise ConfigError(f"alltoall: {rows} rows for {ranks} ranks; pass splits and received, or equal parts")
        return [rows // ranks] * ranks, [rows // ranks] * ranks
    sent, got = [int(n) for n in splits], [int(n) for n in received]
    if len(sent) != ranks or len(got) != ranks or min(sent + got) < 0 or sum(sent) != rows:
        raise ConfigError(
            f"alltoall: splits={sent}, received={got} for {rows} rows and {ranks} ranks; expected a number of rows for "
            f"each rank, those of splits adding up to the rows of x"
        )
    return sent, got


def spans_of(counts: Sequence[int], width: int) -> list[tuple[int, int]]:
    edges = np.cumsum([0, *counts]) * width
    return [(int(a), int(b)) for a, b in itertools.pairwise(edges)]
