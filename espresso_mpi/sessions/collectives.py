"""Collectives as calls of their own: what a session offers besides the mean of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from ..arrays.buffers import Gradient
from ..collectives import calls
from ..collectives.messages.transport import Transport
from ..collectives.progress import Progress
from ..collectives.to_root import gather
from ..engine.batches import Batch
from ..engine.calls import Exchange
from ..engine.dense_piggyback import Copying
from ..feedback import Feedback
from ..types import ITEMSIZE, Route, TensorSpec
from .calling import Calling, plainly
from .copies import Coding, copies_of
from .exchanges import (
    Taken,
    beside,
    by_mpi,
    bytes_of,
    dense_alltoall,
    dense_scatter,
    dense_way,
    exchange_of,
    from_root,
    here,
    in_place,
    onto_root,
    part_of,
    reduce_to,
    reduction_of,
    require_like,
    require_plain,
    rows_of,
    to_all,
)
from .halves import half_of

ReduceName = Literal["mean", "sum", "prod", "min", "max", "land", "lor", "lxor", "band", "bor", "bxor"]


class Collectives(Calling):
    """The collectives of a session.

    Every rank must make the calls. Calls that have names can be in any order. The arrays can come from numpy, CuPy,
    torch, JAX or DLPack. The ranks check what must be equal. Errors and timeouts are those of ``Session.sync``.
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
        """Reduce an array elementwise over the ranks. Every rank gets the result.

        Args:
            x: one array of the same shape and element type on every rank. Without ``out``, it is changed in place.
            op: the operator. ``"mean"`` and ``"sum"`` of floating-point numbers take the session's routes, in a fixed
                order of ranks. All others are operators of MPI: sums, products, extrema, logical (``l…``) and bitwise
                (``b…``) operators.
            name: distinguishes calls that are in flight at the same time. ``feedback`` needs a name and keeps a
                residual under it. Names of ``sync`` and ``push`` are separate.
            out: an array like ``x`` that receives the result.
            compressor, route: as for ``Session``, only for the mean and the sum of floating-point numbers.
            feedback: as for ``Session``. The default is none, so that the call leaves no state behind.
            blocking: whether to wait for the result. Otherwise this and all other collectives return a ``Handle``.

        Returns:
            ``x``, or ``out``; a new array if it is immutable (JAX).

        Raises:
            ConfigError: the operator does not work with the element type, or with a compressor.
            EspressoError: as ``Session.sync``.

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     session.allreduce(np.array([3, 4]), op="max").tolist()
            [3, 4]
        """

        def make(gradients: Sequence[Gradient]) -> Batch | Exchange:
            spec = gradients[0].spec
            if op in ("mean", "sum") and spec.dtype in ITEMSIZE:
                return reduction_of(spec, op, self.topology, name, compressor, route, feedback)
            require_plain("allreduce", op, compressor, route)
            return reduction_by_mpi(self, "allreduce", gradients[0], op)

        plain = plainly(x, out, op, blocking, compressor, feedback, route)
        return self._collective("allreduce", name, lambda: in_place("allreduce", x, out), make, blocking, plain)

    def reduce(
        self, x: Any, op: ReduceName = "mean", *, root: int = 0, name: str = "", out: Any = None,
        compressor: str = "none", route: str | Route | None = None, feedback: Feedback | str | bool = "none",
        blocking: bool = True,
    ) -> Any:  # fmt: skip
        """Reduce an array elementwise over the ranks. The root gets the result. On other ranks, the array is undefined.

        Args:
            x, op, name, out, compressor, route, feedback: as for ``allreduce``.
            root: the rank that gets the result.

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     total = session.reduce(np.ones(3), op="sum", root=0)
        """

        def make(gradients: Sequence[Gradient]) -> Batch | Exchange:
            spec = gradients[0].spec
            self._check_root("reduce", root)
            if op in ("mean", "sum") and spec.dtype in ITEMSIZE:
                plain = compressor in (None, "none") and route is None and feedback in ("none", False)
                segment_bytes = self._options.segment_bytes
                found = reduce_to(gradients[0], op, root, self.topology, segment_bytes) if plain else None
                if found is not None:
                    return found
                return reduction_of(spec, op, self.topology, name, compressor, route, feedback, root, "reduce")
            require_plain("reduce", op, compressor, route)
            return reduction_by_mpi(self, "reduce", gradients[0], op, root)

        plain = plainly(x, out, (op, root), blocking, compressor, feedback, route)
        return self._collective("reduce", name, lambda: in_place("reduce", x, out), make, blocking, plain)

    def broadcast(
        self, x: Any, root: int = 0, *, name: str = "", compressor: str = "none",
        feedback: Feedback | str | bool = "none", blocking: bool = True,
    ) -> Any:  # fmt: skip
        """Give every rank the root's array, in place.

        Args:
            x: an array of the same shape and element type on every rank.
            root: the rank whose values are taken.
            name, compressor, feedback: as for ``allreduce``. Every rank gets the decoded payload, also the root.

        Returns:
            ``x``; a new array if it is immutable (JAX).

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     session.broadcast(np.arange(3), root=0).tolist()
            [0, 1, 2]
        """

        def make(gradients: Sequence[Gradient]) -> Batch | Exchange:
            self._check_root("broadcast", root)
            me, n, coding = self._transport.rank, (gradients[0].spec.size,), Coding(name, compressor, feedback)
            given = n if me == root else ()
            coded = copies_of("broadcast", gradients[0].spec, self.topology, coding, given, n, me, root)
            if coded is not None:
                return coded
            data = bytes_of(gradients[0])
            moves = Copying(data, data, from_root(self.topology.size, data.size, root, me)) if here(gradients) else None
            return exchange_of(
                ["broadcast", root], gradients, lambda transport, x: calls.broadcast(transport, x, root), [data], moves
            )

        plain = plainly(x, None, root, blocking, compressor, feedback)
        return self._collective("broadcast", name, lambda: in_place("broadcast", x, None), make, blocking, plain)

    def allgather(
        self, x: Any, *, name: str = "", out: Any = None, compressor: str = "none", route: str | Route | None = None,
        feedback: Feedback | str | bool = "none", blocking: bool = True,
    ) -> Any:  # fmt: skip
        """Concatenate the arrays of all ranks along the first dimension, in rank order. Every rank gets the result.

        Args:
            x: an array of the same shape and type on every rank, with at least one dimension. It is not changed.
            out: an array of shape ``(ranks * x.shape[0], *x.shape[1:])`` that receives the result.
            name, compressor, route, feedback: as for ``reduce_scatter``, with the second half of the route. Every rank
                gets the decoded payloads, also that of its own array.

        Returns:
            ``out``, or a new array of the library of ``x`` (of numpy for JAX).

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     len(session.allgather(np.zeros(3))) == 3 * session.topology.size
            True
        """

        def make(gradients: Sequence[Gradient]) -> Batch | Exchange:
            size = self.topology.size
            require_like("allgather", gradients[1].spec, gradients[0].spec, size * gradients[0].spec.size)
            half = half_of("allgather", gradients[0].spec, gradients[1].spec, "mean", self.topology, name,
                           compressor, route, feedback)  # fmt: skip
            if half is not None:
                return half
            own, every = (bytes_of(gradient) for gradient in gradients)
            spans = [(rank * own.size, (rank + 1) * own.size) for rank in range(size)]
            me = self._transport.rank

            def act(transport: Transport, own: Any, every: Any) -> Progress:
                every[spans[me][0] : spans[me][1]] = own
                yield from calls.gather_all(transport, every, spans)

            moves = Copying(own, every, to_all(size, own.size, me)) if here(gradients) else None
            return exchange_of(["allgather"], gradients, act, [own, every], moves)

        plain = plainly(x, out, None, blocking, compressor, feedback, route)
        taken = partial(beside, "allgather", x, out, lambda rows: rows * self.topology.size)
        return self._collective("allgather", name, taken, make, blocking, plain)

    def reduce_scatter(
        self, x: Any, op: ReduceName = "mean", *, name: str = "", out: Any = None, compressor: str = "none",
        route: str | Route | None = None, feedback: Feedback | str | bool = "none", blocking: bool = True,
    ) -> Any:  # fmt: skip
        """Reduce an array elementwise over the ranks, and give each rank a part of the result, in rank order.

        Args:
            x: an array of the same shape and element type on every rank. It is not changed, and can be read-only. Its
                first dimension is cut into one part per rank, all of equal size.
            op, name, compressor, feedback: as for ``allreduce``.
            out: an array of shape ``(x.shape[0] / ranks, *x.shape[1:])`` that receives this rank's part.
            route: the route whose first half is taken. docs/collectives.md has the default.

        Returns:
            ``out``, or a new array of the library of ``x`` (of numpy for JAX).

        Raises:
            ConfigError: the first dimension is no multiple of the number of ranks, or the route has no halves.

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     session.reduce_scatter(np.ones((session.topology.size, 2))).tolist()
            [[1.0, 1.0]]
        """

        def make(gradients: Sequence[Gradient]) -> Batch | Exchange:
            (whole, own), spec, size = gradients, gradients[0].spec, self.topology.size
            require_like("reduce_scatter", own.spec, spec, spec.size // size)
            half = half_of("reduce_scatter", spec, spec, op, self.topology, name, compressor, route, feedback)
            if half is not None:
                return half
            return dense_scatter(whole, own, op, size)

        taken = partial(beside, "reduce_scatter", x, out, lambda rows: part_of(rows, self.topology.size))
        plain = plainly(x, out, op, blocking, compressor, feedback, route)
        return self._collective("reduce_scatter", name, taken, make, blocking, plain)

    def gather(
        self, x: Any, *, root: int = 0, name: str = "", out: Any = None, compressor: str = "none",
        feedback: Feedback | str | bool = "none", blocking: bool = True,
    ) -> Any:  # fmt: skip
        """As ``allgather``, but only the root gets the result; other ranks get None.

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     everyone = session.gather(np.zeros(3), root=0)
        """
        me = self._transport.rank

        def make(gradients: Sequence[Gradient]) -> Batch | Exchange:
            self._check_root("gather", root)
            size = self.topology.size
            x, every = sorted(gradients, key=lambda gradient: gradient.spec.name == "out")
            spec, coding = x.spec, Coding(name, compressor, feedback)
            if me == root:
                require_like("gather", every.spec, spec, size * spec.size)
            taken = [spec.size] * size if me == root else []
            coded = copies_of("gather", spec, self.topology, coding, [spec.size], taken, me, root)
            if coded is not None:
                return coded
            given = bytes_of(x), bytes_of(every)
            moves = Copying(*given, onto_root(size, given[0].size, root, me)) if here([x]) else None
            return exchange_of(["gather", root], [x], partial(gather, root=root), given, moves, early=True)

        def take() -> Taken:
            if me == root:
                return beside("gather", x, out, self.topology.size.__mul__)
            found, nothing = beside("gather", x, None, lambda rows: 0)
            return {"out": nothing, "x": found["x"]}, None

        plain = plainly(x, out if me == root else None, root, blocking, compressor, feedback)
        return self._collective("gather", name, take, make, blocking, plain)

    def alltoall(
        self,
        x: Any,
        *,
        splits: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
        name: str = "",
        out: Any = None,
        compressor: str = "none",
        feedback: Feedback | str | bool = "none",
        blocking: bool = True,
    ) -> Any:
        """Send a part of an array to each rank, and concatenate the received parts, in rank order.

        Args:
            x: an array of the same element type and ``x.shape[1:]`` on every rank. It is not changed.
            splits: number of rows for each rank. Default: equal numbers. The splits can differ between ranks.
            received: number of rows from each rank, with ``splits``: what the splits of the others say for this rank.
            out: an array of shape ``(sum(received), *x.shape[1:])`` that receives the result.
            name, compressor, feedback: as for ``allreduce``. Each part is compressed by itself, also the part for this
                rank. Feedback keeps a residual for each part, so the splits of a name must stay the same.

        Returns:
            ``out``, or a new array of the library of ``x`` (of numpy for JAX).

        Raises:
            ConfigError: the splits do not add up to the rows, or only one of ``splits`` and ``received`` is given.

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     session.alltoall(np.full(session.topology.size, 7)).tolist() == [7] * session.topology.size
            True
        """

        def make(gradients: Sequence[Gradient]) -> Batch | Exchange:
            size = self.topology.size
            spec, coding, me = gradients[0].spec, Coding(name, compressor, feedback), self._transport.rank
            kind = TensorSpec("x", spec.shape[1:], spec.dtype, spec.device)
            sent, got = rows_of(spec.shape[0], splits, received, size)
            require_like("alltoall", gradients[1].spec, spec, sum(got) * kind.size)
            given, taken = ([rows * kind.size for rows in part] for part in (sent, got))
            coded = copies_of("alltoall", spec, self.topology, coding, given, taken, me, splits=splits is not None)
            if coded is not None:
                self._splits.require_same(coding, sent)
                return coded
            return dense_alltoall(gradients, kind, sent, got, splits is None, me)

        taken = partial(beside, "alltoall", x, out, lambda n: sum(rows_of(n, splits, received, self.topology.size)[1]))
        plain = plainly(x, out, (splits, received), blocking, compressor, feedback)
        return self._collective("alltoall", name, taken, make, blocking, plain)

    def barrier(self) -> None:
        """Wait until every rank has called it and all calls before it have ended.

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     session.barrier()
        """
        if not self._repeat_barrier():
            self._together("barrier", lambda: None)


def reduction_by_mpi(session: Collectives, kind: str, gradient: Gradient, op: str, root: int | None = None) -> Exchange:
    """A reduction by MPI's own operator, of a call of a session; ``root``: of a reduce."""
    way = dense_way(session._options, session.topology)
    return by_mpi(kind, gradient, op, root, way, session.topology, session._transport.rank)
