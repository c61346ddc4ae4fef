"""Collectives as calls of their own: what a session offers besides the mean of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from .. import compressors
from ..arrays.any_dtype import adopt_any, empty_like
from ..arrays.buffers import Gradient
from ..collectives import calls
from ..collectives.messages.agreement import fingerprint
from ..collectives.program import check_route
from ..engine.batches import Batch, Item
from ..engine.calls import Exchange, PendingCall
from ..errors import ConfigError
from ..feedback import NO_FEEDBACK, Feedback
from ..options import Options
from ..types import ITEMSIZE, Route, TensorSpec
from .base import SessionBase
from .handles import Handle

ReduceName = Literal["mean", "sum", "prod", "min", "max", "land", "lor", "lxor", "band", "bor", "bxor"]
_MPI = ("sum", "prod", "min", "max", "land", "lor", "lxor", "band", "bor", "bxor")
_HALVES = ("float16", "bfloat16")


class Collectives(SessionBase):
    """The collectives of a session. All are collective calls: every rank makes them, in any order if they have names.

    Arrays are numpy's, CuPy's, torch's, JAX's, or of DLPack. What must be equal on all ranks is checked; errors and
    timeouts are those of ``Session.sync``.
    """

    def allreduce(
        self,
        x: Any,
        op: ReduceName = "mean",
        *,
        name: str = "",
        out: Any = None,
        compressor: str = "none",
        route: str | Route | None = None,
        feedback: Feedback | str | bool = "none",
        blocking: bool = True,
    ) -> Any:
        """Reduce an array elementwise over the ranks; every rank gets the result.

        Args:
            x: one array of the same shape and element type on every rank; changed in place unless ``out`` is given.
            op: ``"mean"`` and ``"sum"`` of floating-point numbers take the session's routes, in a fixed order of ranks.
                Everything else is MPI's operator: sums, products, extrema, logical (``l…``) and bitwise (``b…``) ones.
            name: tells calls apart that are under way at a time; needed with ``feedback``, which keeps a residual under
                it. Names of ``sync`` and ``push`` are others.
            out: receives the result; like ``x``.
            compressor, route: as for ``Session``, for this call; only for mean and sum of floating-point numbers.
            feedback: as for ``Session``; default: none, so that the call leaves no state behind.
            blocking: wait for the result; else return a ``Handle`` at once. So in all collectives.

        Returns:
            ``x``, or ``out``; a new array if it is immutable (JAX).

        Raises:
            ConfigError: the operator does not go with the elements, or with a compressor; others as ``Session.sync``.

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     session.allreduce(np.array([3, 4]), op="max").tolist()
            [3, 4]
        """
        target = self._target(x, out)

        def make(gradients: Sequence[Gradient]) -> Batch | Exchange:
            spec = gradients[0].spec
            floats = spec.dtype in ITEMSIZE
            if op == "mean" and not floats:
                raise ConfigError(f"allreduce: op='mean' of {spec.dtype}; expected floating-point numbers; use op='sum'")
            if op in ("mean", "sum") and floats:
                return self._reduction(spec, op == "sum", compressor, route, feedback, name)
            _require_plain("allreduce", op, compressor, route)
            return _by_mpi("allreduce", gradients[0], op, None)

        return self._collective("allreduce", name, {"x": target}, target, make, blocking)

    def reduce(
        self, x: Any, op: ReduceName = "mean", *, root: int = 0, name: str = "", out: Any = None,
        blocking: bool = True,
    ) -> Any:  # fmt: skip
        """Reduce an array elementwise over the ranks; the root gets the result, on others the array is undefined.

        Args:
            x, op, name, out: as for ``allreduce``; root: a rank.
        """
        target = self._target(x, out)

        def make(gradients: Sequence[Gradient]) -> Batch | Exchange:
            spec = gradients[0].spec
            self._check_root("reduce", root)
            if op in ("mean", "sum") and spec.dtype in ITEMSIZE:
                return self._reduction(spec, op == "sum", "none", None, "none", name, ("reduce", root))
            if op == "mean":
                raise ConfigError(f"reduce: op='mean' of {spec.dtype}; expected floating-point numbers; use op='sum'")
            return _by_mpi("reduce", gradients[0], op, root)

        return self._collective("reduce", name, {"x": target}, target, make, blocking)

    def broadcast(self, x: Any, root: int = 0, *, name: str = "", blocking: bool = True) -> Any:
        """Give every rank the root's array, in place.

        Args:
            x: of the same shape and element type on every rank; root: the rank whose values are taken.

        Returns:
            ``x``; a new array if it is immutable (JAX).

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     session.broadcast(np.arange(3), root=0).tolist()
            [0, 1, 2]
        """

        def make(gradients: Sequence[Gradient]) -> Exchange:
            self._check_root("broadcast", root)
            x = _bytes(gradients[0])
            return _exchange(["broadcast", root], gradients, lambda engine: calls.broadcast(engine.transport, x, root))

        return self._collective("broadcast", name, {"x": x}, x, make, blocking)

    def allgather(self, x: Any, *, name: str = "", out: Any = None, blocking: bool = True) -> Any:
        """Concatenate the ranks' arrays along the first dimension, in rank order; every rank gets the result.

        Args:
            x: of the same shape and element type on every rank, with at least one dimension; not changed.
            out: receives the result; shape (ranks · x.shape[0], *x.shape[1:]).

        Returns:
            ``out``, or a new array of the library of ``x`` (of numpy for JAX).

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     len(session.allgather(np.zeros(3))) == 3 * session.topology.size
            True
        """
        shape = _shape("allgather", x)
        out = empty_like(x, (shape[0] * self.topology.size, *shape[1:])) if out is None else out

        def make(gradients: Sequence[Gradient]) -> Exchange:
            own, every = (_bytes(gradient) for gradient in gradients)
            _require_size("allgather", gradients[1].spec, self.topology.size * gradients[0].spec.size)
            spans = [(rank * own.size, (rank + 1) * own.size) for rank in range(self.topology.size)]
            me = self._transport.rank

            def progress(engine: Any) -> Any:
                every[spans[me][0] : spans[me][1]] = own
                yield from calls.gather_all(engine.transport, every, spans)

            return _exchange(["allgather"], gradients, progress)

        return self._collective("allgather", name, {"x": x, "out": out}, out, make, blocking)

    def reduce_scatter(
        self, x: Any, op: ReduceName = "mean", *, name: str = "", out: Any = None, blocking: bool = True
    ) -> Any:
        """Reduce an array elementwise over the ranks, and give each rank a part of the result, in rank order.

        Args:
            x: of the same shape and element type on every rank; not changed. Its first dimension is cut into as many
                equal parts as there are ranks.
            op, name: as for ``allreduce``; out: receives this rank's part; shape (x.shape[0] / ranks, *x.shape[1:]).

        Returns:
            ``out``, or a new array of the library of ``x`` (of numpy for JAX).

        Raises:
            ConfigError: the first dimension cannot be cut so; others as ``allreduce``.
        """
        shape, size = _shape("reduce_scatter", x), self.topology.size
        if shape[0] % size:
            raise ConfigError(f"reduce_scatter: {shape[0]} rows for {size} ranks; expected equal parts; pad the array")
        out = empty_like(x, (shape[0] // size, *shape[1:])) if out is None else out

        def make(gradients: Sequence[Gradient]) -> Exchange:
            whole, own = gradients
            _require_size("reduce_scatter", own.spec, whole.spec.size // size)
            spans = _spans([1] * size, own.spec.size)
            if op in ("mean", "sum") and whole.spec.dtype in ITEMSIZE:
                divisor, dtype = float(size) if op == "mean" else 1.0, str(whole.spec.dtype)
                return _exchange(
                    ["reduce_scatter", op], gradients,
                    lambda engine: calls.reduce_scatter(engine.transport, whole.array, own.array, dtype, spans, divisor),
                )  # fmt: skip
            if op == "mean":
                raise ConfigError(f"reduce_scatter: op='mean' of {whole.spec.dtype}; expected floating-point numbers")
            copied = whole._replace(array=whole.array.copy())
            reduced, me = _by_mpi("reduce_scatter", copied, op, None), self._transport.rank

            def progress(engine: Any) -> Any:
                yield from reduced.progress(engine)
                own.array[...] = copied.array[slice(*spans[me])]

            return Exchange(reduced.said, reduced.tensors, progress)

        return self._collective("reduce_scatter", name, {"x": x, "out": out}, out, make, blocking)

    def gather(self, x: Any, *, root: int = 0, name: str = "", out: Any = None, blocking: bool = True) -> Any:
        """As ``allgather``, but only the root gets the result; other ranks get None."""
        shape, size, me = _shape("gather", x), self.topology.size, self._transport.rank
        if out is None and me == root:
            out = empty_like(x, (shape[0] * size, *shape[1:]))

        def make(gradients: Sequence[Gradient]) -> Exchange:
            self._check_root("gather", root)
            own, every = _bytes(gradients[0]), _bytes(gradients[-1])
            if me == root:
                _require_size("gather", gradients[1].spec, size * gradients[0].spec.size)
            sends = [(0, own.size) if rank == root else (0, 0) for rank in range(size)]
            receives = [(r * own.size, (r + 1) * own.size) if me == root else (0, 0) for r in range(size)]
            return _exchange(
                ["gather", root], gradients[:1], lambda engine: calls.exchange(engine.transport, own, every, sends, receives)
            )

        arrays = {"x": x, "out": out} if me == root else {"x": x}
        return self._collective("gather", name, arrays, out if me == root else None, make, blocking)

    def alltoall(
        self,
        x: Any,
        *,
        splits: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
        name: str = "",
        out: Any = None,
        blocking: bool = True,
    ) -> Any:
        """Send a part of an array to each rank, and concatenate what arrives along the first dimension, in rank order.

        Args:
            x: of the same element type and ``x.shape[1:]`` on every rank; not changed.
            splits: rows for each rank; default: as many for each. They may differ between ranks.
            received: rows from each rank, where ``splits`` is given: what the others' ``splits`` say for this rank.
            out: receives the result; shape (sum(received), *x.shape[1:]).

        Returns:
            ``out``, or a new array of the library of ``x`` (of numpy for JAX).

        Raises:
            ConfigError: the splits do not add up to the rows, or are given on one side only.
        """
        shape, size = _shape("alltoall", x), self.topology.size
        rows = int(np.prod(shape[1:], dtype=np.int64))
        sent, got = _splits(shape[0], splits, received, size)
        out = empty_like(x, (sum(got), *shape[1:])) if out is None else out

        def make(gradients: Sequence[Gradient]) -> Exchange:
            mine, every = (_bytes(gradient) for gradient in gradients)
            _require_size("alltoall", gradients[1].spec, sum(got) * rows)
            width = rows * (mine.size // max(gradients[0].spec.size, 1))
            sends, receives = _spans(sent, width), _spans(got, width)
            kind = TensorSpec("x", shape[1:], gradients[0].spec.dtype, gradients[0].spec.device)
            return Exchange(
                ["alltoall", splits is None], ((kind.name, f"rows of {kind}", kind.device),),
                lambda engine: calls.exchange(engine.transport, mine, every, sends, receives),
            )  # fmt: skip

        return self._collective("alltoall", name, {"x": x, "out": out}, out, make, blocking)

    def barrier(self) -> None:
        """Wait until every rank has called it and all calls before it have ended."""
        self._together("barrier", lambda: None)

    # --- shared -------------------------------------------------------------------------------------------------------

    def _collective(
        self, kind: str, name: str, arrays: dict[str, Any], given: Any,
        make: Callable[[Sequence[Gradient]], Batch | Exchange], blocking: bool,
    ) -> Any:  # fmt: skip
        self._engine.require_usable()
        self._held.release()
        if not blocking:
            self._transport.require_threads()
        title = f"{kind}({name!r})" if name else kind
        call = self._intake.collective((kind, name), arrays, given, title, make, self._options.debug)
        if blocking:
            return self._wait(self._engine.submit(call))
        self._engine.submit(call, background=True)
        self._pending.add(call)
        return Handle(self, call)

    def _target(self, x: Any, out: Any) -> Any:
        """The array to work on: ``x`` itself, or ``out`` with the values of ``x``."""
        if out is None:
            return x
        out[...] = x
        return out

    def _reduction(
        self, spec: TensorSpec, total: bool, compressor: str, route: str | Route | None, feedback: Feedback | str | bool,
        name: str, more: tuple[Any, ...] = (),
    ) -> Batch:  # fmt: skip
        """The batch of a sum or a mean by a route."""
        chosen, problem = Options.checked(
            compressor=compressor, route=route, feedback=feedback, min_bytes=0, seed=self._options.seed
        )
        if problem:
            raise ConfigError(f"allreduce: {problem}")
        named = replace(spec, name=f"allreduce {name}".strip())
        strategy = chosen.strategy(named, self.topology)
        method = None if strategy.compressor == "none" else compressors.get(strategy.compressor)
        check_route(strategy.route, self.topology, method)
        shaped = None if method is None else method.shaped(spec.shape)
        how = NO_FEEDBACK if shaped is None else chosen.feedback.resolved(shaped, spec.size)
        if how != NO_FEEDBACK and not name:
            raise ConfigError(
                f"allreduce: feedback={str(how)!r} without a name; the residual is kept under it: pass name="
            )
        item = Item(0, named, strategy, shaped, how, total=total)
        said = ["total", total, str(compressor), str(strategy.route), str(how), list(more)]
        digest = fingerprint([said, named.name, list(spec.shape), spec.dtype, spec.device])
        return Batch((named,), (item,) if spec.size else (), digest, exact=method is None)

    def _check_root(self, kind: str, root: int) -> None:
        if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < self.topology.size:
            raise ConfigError(f"{kind}: root={root!r}; expected a rank, from 0 to {self.topology.size - 1}")


def _bytes(gradient: Gradient) -> Any:
    return gradient.array.view(np.uint8)


def _exchange(said: list[Any], gradients: Sequence[Gradient], progress: Callable[[Any], Any]) -> Exchange:
    return Exchange(said, tuple((g.spec.name, str(g.spec), g.spec.device) for g in gradients), progress)


def _by_mpi(kind: str, gradient: Gradient, op: str, root: int | None) -> Exchange:
    """A reduction by MPI's own operator. MPI has no 16-bit floating-point numbers: these go through float32."""
    spec = gradient.spec
    if op not in _MPI:
        raise ConfigError(f"{kind}: op={op!r}; expected mean or one of {', '.join(_MPI)}")
    if spec.device != "cpu":
        raise ConfigError(f"{kind}: op={op!r} of an array on the GPU; expected mean or sum there; pass a copy in host memory")
    if spec.dtype in _HALVES and op != "sum":
        raise ConfigError(f"{kind}: op={op!r} of {spec.dtype}; MPI has no such type; pass x.astype('float32')")
    bitwise, floating = op in ("band", "bor", "bxor"), str(spec.dtype).startswith(("float", "complex"))
    ordered = op in ("min", "max", "land", "lor", "lxor")
    if (bitwise and floating) or (ordered and str(spec.dtype).startswith("complex")):
        raise ConfigError(f"{kind}: op={op!r} of {spec.dtype}; MPI has no such operator; use mean, sum or prod")
    op = {"sum": "lor", "max": "lor", "prod": "land", "min": "land"}.get(op, op) if spec.dtype == "bool" else op
    return _exchange([kind, op, root], [gradient], lambda engine: calls.reduce_by_mpi(engine.transport, gradient.array, op, root))


def _require_plain(kind: str, op: str, compressor: str, route: Any) -> None:
    if compressor != "none" or route is not None:
        raise ConfigError(
            f"{kind}: compressor={compressor!r}, route={route!r} with op={op!r}; only mean and sum of floating-point "
            f"numbers are compressed or take a route; leave them out"
        )


def _shape(kind: str, x: Any) -> tuple[int, ...]:
    shape = tuple(getattr(x, "shape", ()))
    if not shape:
        raise ConfigError(f"{kind}: got {type(x).__name__} without dimensions; expected an array of at least one")
    return shape


def _require_size(kind: str, spec: TensorSpec, size: int) -> None:
    if spec.size != size:
        raise ConfigError(f"{kind}: out has {spec.size} elements; expected {size}")


def _splits(
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


def _spans(counts: Sequence[int], width: int) -> list[tuple[int, int]]:
    edges = np.cumsum([0, *counts]) * width
    return [(int(a), int(b)) for a, b in zip(edges, edges[1:])]
