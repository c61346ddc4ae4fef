"""What collectives do, as the engine takes it, and the checks of their arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import index
from typing import Any

import numpy as np

from .. import compressors
from ..arrays.any_dtype import empty_like
from ..arrays.buffers import Gradient
from ..collectives import calls, to_root
from ..collectives.data.layout import Topology
from ..collectives.data.reduction import ReduceOp, arithmetic
from ..collectives.messages.agreed import Parts
from ..collectives.messages.agreement import fingerprint
from ..collectives.messages.mpi_reduction import operator_of
from ..collectives.messages.part_sizes import shown
from ..collectives.messages.sum_calls import SMALL
from ..collectives.messages.transport import Transport
from ..collectives.program import check_route
from ..collectives.progress import Progress
from ..engine.batches import Batch, Item
from ..engine.calls import Exchange
from ..engine.dense_piggyback import NOTHING, Combining, Copying, PiggybackData, Scattering
from ..errors import ConfigError
from ..feedback import NO_FEEDBACK, Feedback
from ..options import Options, default_route
from ..types import ITEMSIZE, Route, TensorSpec

_MPI = ("sum", "prod", "min", "max", "land", "lor", "lxor", "band", "bor", "bxor")
_OF_BOOL = {
    "sum": "lor", "max": "lor", "bor": "lor", "prod": "land", "min": "land", "band": "land", "bxor": "lxor",
}  # fmt: skip

Act = Callable[..., Progress]
"""What a collective does, given the transport and flat arrays: what is given, and what receives the result, if it is
another."""

Taken = tuple[dict[str, Any], Any]
"""The arrays of a call by name, and what it returns: one of them or None."""


def bytes_of(gradient: Gradient) -> Any:
    return gradient.array.view(np.uint8)


def exchange_of(
    said: list[Any], gradients: Sequence[Gradient], act: Act, arrays: Sequence[Any],
    moves: PiggybackData | None = None, follows: bool = False,
    tensors: tuple[tuple[str, str, str], ...] | None = None, early: bool = False, sizes: Any = None,
) -> Exchange:  # fmt: skip
    """What a call does.

    Args:
        said: as of ``Exchange``.
        gradients: the arrays that ranks compare, or of which ``tensors`` says what they compare.
        act: what is done with ``arrays``.
        moves, follows: as of ``Exchange``, left out where the data are on a GPU.
        early, sizes: as of ``Exchange``.
    """
    if tensors is None:
        tensors = tuple((g.spec.name, str(g.spec), g.spec.device) for g in gradients)

    def with_arrays(*arrays: Any) -> Callable[[Transport], Progress]:
        return lambda transport: act(transport, *arrays)

    progress = with_arrays(*arrays)
    if not here(gradients):
        return Exchange(said, tensors, progress, sizes=sizes)
    kinds = [array.dtype for array in arrays]

    def over(x: Any, result: Any) -> Callable[[Transport], Progress]:
        return with_arrays(*(given.reshape(-1).view(kind) for given, kind in zip((x, result), kinds)))

    return Exchange(said, tensors, progress, moves, follows, over, early, sizes)


def here(gradients: Sequence[Gradient]) -> bool:
    """Whether all arrays are in host memory."""
    return all(gradient.spec.device == "cpu" for gradient in gradients)


def reduction_of(
    spec: TensorSpec,
    op: str,
    topology: Topology,
    name: str,
    compressor: str = "none",
    route: str | Route | None = None,
    feedback: Feedback | str | bool = "none",
    root: int | None = None,
    kind: str = "allreduce",
) -> Batch:
    """A sum or a mean of floating-point numbers by a route.

    Args:
        root: of a reduce, which takes the way of an allreduce.
    """
    plain = compressor == "none" and route is None and feedback == "none"  # of others, a method may be registered anew
    make = _reduction_of if plain else _reduction_of.__wrapped__
    return make(spec, op, topology, name, compressor, route, feedback, root, kind)


@lru_cache(maxsize=1024)
def _reduction_of(
    spec: TensorSpec,
    op: str,
    topology: Topology,
    name: str,
    compressor: str,
    route: str | Route | None,
    feedback: Feedback | str | bool,
    root: int | None,
    kind: str,
) -> Batch:
    options, problem = Options.checked(compressor=compressor, route=route, feedback=feedback, min_bytes=0)
    if problem:
        raise ConfigError(f"{kind}: {problem}")
    named = replace(spec, name=f"{kind} {name}".strip())
    strategy = options.strategy(named, topology)
    method = None if strategy.compressor == "none" else compressors.get(strategy.compressor)
    check_route(strategy.route, topology, method)
    shaped = None if method is None else method.shaped(spec.shape)
    how = NO_FEEDBACK if shaped is None else options.feedback.resolved(shaped, spec.size)
    if how != NO_FEEDBACK and not name:
        raise ConfigError(f"{kind}: feedback={str(how)!r} without a name; the residual is kept under it: pass name=")
    item = Item(0, named, strategy, shaped, how, total=op == "sum")
    said = [op, str(compressor), str(strategy.route), str(how), root]
    digest = fingerprint([said, named.name, list(spec.shape), spec.dtype, spec.device])
    return Batch((named,), (item,) if spec.size else (), digest, exact=method is None)


def reduce_to(gradient: Gradient, op: str, root: int, topology: Topology, segment_bytes: int) -> Exchange | None:
    """A dense sum or mean at a root on another node; None where it takes the way of an allreduce.

    That counts the sums that are cut to the range of their type, which only those of 16 bits are.
    """
    spec = gradient.spec
    if len(topology.nodes) == 1 or spec.device != "cpu" or spec.dtype not in ("float32", "float64"):
        return None
    dtype, reduce_op = str(spec.dtype), None if op == "mean" else ReduceOp("sum")
    return exchange_of(
        ["reduce", op, root], [gradient],
        lambda transport, x: to_root.reduce(transport, x, dtype, root, reduce_op, segment_bytes),
        [gradient.array], NOTHING, follows=True,
    )  # fmt: skip


def by_mpi(
    kind: str, gradient: Gradient, op: str, root: int | None, way: tuple[Route, int], topology: Topology, me: int
) -> Exchange:
    """A reduction by MPI's own operator.

    Args:
        root: of a reduce; way: as ``dense_way`` returned it; me: this rank.
    """
    spec, (route, segment_bytes) = gradient.spec, way
    op, on_host = operator_for(kind, spec, op), spec.device == "cpu"

    def act(transport: Transport, x: Any) -> Progress:
        if root is not None and len(transport.topology.nodes) > 1 and on_host:
            return to_root.reduce(transport, x, str(x.dtype), root, operator_of(transport, op), segment_bytes)
        return calls.allreduce(transport, x, operator_of(transport, op), route, segment_bytes)

    x, said = gradient.array, [kind, op, root]
    if on_host and len(topology.nodes) == 1 and 0 < spec.nbytes <= SMALL:
        return exchange_of(said, [gradient], act, [x], Combining(x, op, to_all(topology.size, spec.nbytes, me)))
    return exchange_of(said, [gradient], act, [x], NOTHING, follows=True)


def dense_way(options: Options, topology: Topology) -> tuple[Route, int]:
    """The route of dense arrays, and how long segments are."""
    return Route.parse(default_route(topology, compressed=False)), options.segment_bytes


def operator_for(kind: str, spec: TensorSpec, op: str) -> str:
    """The name of MPI's operator. MPI has no 16-bit floating-point numbers: these are refused."""
    if op == "mean":
        raise ConfigError(f"{kind}: op='mean' of {spec.dtype}; expected floating-point numbers; use op='sum'")
    if op not in _MPI:
        raise ConfigError(f"{kind}: op={op!r}; expected mean or one of {', '.join(_MPI)}")
    if ITEMSIZE.get(spec.dtype or "") == 2:
        raise ConfigError(f"{kind}: op={op!r} of {spec.dtype}; MPI has no such type; pass x.astype('float32')")
    number = str(spec.dtype)
    logical = op in ("land", "lor", "lxor", "band", "bor", "bxor") and number.startswith(("float", "complex"))
    if logical or (op in ("min", "max") and number.startswith("complex")):
        raise ConfigError(f"{kind}: op={op!r} of {spec.dtype}; MPI has no such operator; use mean, sum or prod")
    return _OF_BOOL.get(op, op) if spec.dtype == "bool" else op


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


def in_place(kind: str, x: Any, out: Any) -> Taken:
    """The array to work on: ``x`` itself, or ``out`` with the values of ``x``."""
    if out is None:
        return {"x": x}, x
    if _form(out) != _form(x):
        raise ConfigError(f"{kind}: out is of {_described(out)}; expected that of x, {_described(x)}")
    target = out.detach() if hasattr(out, "detach") else out
    target[...] = x.detach() if hasattr(x, "detach") else x
    return {"x": out}, out


def _form(x: Any) -> tuple[Any, str]:
    return tuple(getattr(x, "shape", ())), str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch.")


def _described(x: Any) -> str:
    shape, dtype = _form(x)
    return f"shape {shape} and type {dtype}"


def beside(kind: str, x: Any, out: Any, rows: Callable[[int], int]) -> Taken:
    """``x``, and the array that receives the result.

    Args:
        rows: the rows of the result, given those of ``x``.
    """
    shape = shape_of(kind, x)
    count = rows(shape[0])
    out = empty_like(x, (count, *shape[1:])) if out is None else out
    return {"x": x, "out": out}, out


def part_of(rows: int, ranks: int) -> int:
    """The rows of one rank's part."""
    if rows % ranks:
        raise ConfigError(f"reduce_scatter: {rows} rows for {ranks} ranks; expected equal parts; pad the array")
    return rows // ranks


def require_like(kind: str, out: TensorSpec, x: TensorSpec, size: int) -> None:
    """Refuse an array for the result that is not like ``x`` but for its number of elements."""
    if (out.size, out.dtype, out.device) != (size, x.dtype, x.device):
        raise ConfigError(
            f"{kind}: out has {out.size} elements of {out.dtype} on {out.device}; "
            f"expected {size} of {x.dtype} on {x.device}, as x"
        )


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
    try:
        sent, got = list(map(index, splits)), list(map(index, received))
    except TypeError as error:
        raise ConfigError(f"alltoall: splits={splits}, received={received}: {error}; expected whole numbers") from None
    if len(sent) != ranks or len(got) != ranks or min(sent + got) < 0 or sum(sent) != rows:
        raise ConfigError(
            f"alltoall: splits={sent}, received={got} for {rows} rows and {ranks} ranks; expected a number of rows for "
            f"each rank, those of splits adding up to the rows of x"
        )
    return sent, got


def dense_alltoall(
    gradients: Sequence[Gradient], row: TensorSpec, sent: Sequence[int], got: Sequence[int], equal: bool, me: int
) -> Exchange:
    """An alltoall of rows.

    Args:
        gradients: what is read, and what gets the result; sent, got: rows to and from each rank.
        equal: whether all parts of all ranks have the same size; me: this rank.
    """
    mine, every = (bytes_of(gradient) for gradient in gradients)
    sends, receives = spans_of(sent, row.nbytes), spans_of(got, row.nbytes)
    begins, lands = [sends[me][0]] * len(sends), [receives[me][0]] * len(sends)
    return exchange_of(
        ["alltoall", gradients[0].spec.shape[0] if equal else None], gradients,
        lambda transport, x, out: calls.alltoall(transport, x, out, sends, receives, equal), [mine, every],
        Copying(mine, every, Parts(sends, receives, begins, lands, known=equal)) if here(gradients) else None,
        tensors=((row.name, f"rows of {row}", row.device),), early=True,
        sizes=None if equal else shown(([rows * row.nbytes for rows in sent], [rows * row.nbytes for rows in got])),
    )  # fmt: skip


def to_all(size: int, nbytes: int, me: int) -> Parts:
    """Every rank gives the same bytes to all, which come one after the other."""
    lands = [me * nbytes] * size
    return Parts([(0, nbytes)] * size, spans_of([1] * size, nbytes), [0] * size, lands, shared=True)


def from_root(size: int, nbytes: int, root: int, me: int) -> Parts:
    """The root gives its bytes to all others."""
    here = [(0, nbytes) if rank != root and me == root else (0, 0) for rank in range(size)]
    there = [(0, nbytes) if rank == root and me != root else (0, 0) for rank in range(size)]
    return Parts(here, there, [0] * size, [0] * size, shared=True)


def onto_root(size: int, nbytes: int, root: int, me: int) -> Parts:
    """Every rank gives its bytes to the root, where they come one after the other."""
    gives = [(0, nbytes) if rank == root else (0, 0) for rank in range(size)]
    takes = spans_of([1] * size, nbytes) if me == root else [(0, 0)] * size
    return Parts(gives, takes, [0] * size, [me * nbytes] * size, shared=True)


def dense_scatter(whole: Gradient, own: Gradient, op: str, size: int) -> Exchange:
    """A reduce-scatter into equal parts."""
    spans, gradients = spans_of([1] * size, own.spec.size), (whole, own)
    arrays = [whole.array, own.array]
    if op in ("mean", "sum") and whole.spec.dtype in ITEMSIZE:
        dtype, reduce_op = str(whole.spec.dtype), None if op == "mean" else ReduceOp("sum")
        return exchange_of(
            ["reduce_scatter", op], gradients,
            lambda transport, x, own: calls.reduce_scatter(transport, x, own, dtype, spans, reduce_op), arrays,
            _scattering(whole.array, own.array, dtype, spans, op) if here(gradients) and whole.spec.size else None,
        )  # fmt: skip
    operator, kind = operator_for("reduce_scatter", whole.spec, op), str(whole.array.dtype)
    return exchange_of(
        ["reduce_scatter", operator], gradients,
        lambda transport, x, own: calls.reduce_scatter(
            transport, x, own, kind, spans, operator_of(transport, operator)
        ),
        arrays, NOTHING, follows=True,
    )  # fmt: skip


def _scattering(x: Any, own: Any, dtype: str, spans: Sequence[tuple[int, int]], op: str) -> Scattering:
    """A reduce-scatter of floating-point numbers on the host."""
    how = arithmetic(float(len(spans)) if op == "mean" else 1.0, dtype)
    return Scattering(x, own, how, np.array(spans, np.int64).reshape(-1))


def spans_of(counts: Sequence[int], width: int) -> list[tuple[int, int]]:
    edges = np.cumsum([0, *counts]) * width
    return [(int(a), int(b)) for a, b in itertools.pairwise(edges)]
