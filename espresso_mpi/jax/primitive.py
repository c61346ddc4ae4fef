"""The primitive of JAX that averages arrays: a foreign-function call on one CPU, else an ordered callback.

A program calls ``_execute`` with the addresses of its arrays. They are averaged where they are: XLA gives an argument's
memory to its result, and copies the argument before only if the program still needs it. The order of the calls, in a
program and between programs, is that of the tokens of JAX's ordered effect of callbacks, or that of a number which one
call passes to the next. May import: JAX.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import io_callback

from ..errors import ConfigError
from ..optim.messages import wait_for
from ..optim.rules import GradientMeans
from ..session import Session
from . import abi

_LOG = logging.getLogger("espresso_mpi")

_TARGET = "espresso_mpi_sync"


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """A place in a program where arrays are averaged; what compiled programs keep alive, and the session with it.

    Attributes:
        ordered: whether JAX's ordered effects order the calls.
        counted: whether a token, an int32, follows the arrays: the number of calls before this one.
        dense: makes the means, if it is given: of gradients in the warm-up of an optimizer.
        act: called in the place of averaging, if it is given, with numpy arrays by name, which it changes. It passes
            none of them on, because their memory is that of the program.
    """

    session: Session
    names: tuple[str, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    ordered: bool
    counted: bool = False
    dense: GradientMeans | None = None
    act: Callable[[dict[str, np.ndarray]], None] | None = None
    number: int = dataclasses.field(default_factory=itertools.count(1).__next__)

    def by_callback(self, *arrays: Any) -> list[np.ndarray]:
        """The means of the arrays; numpy only: jax.numpy in a callback can deadlock."""
        with _alone(self.session):
            for target, array in zip(self._memory.values(), arrays):
                np.copyto(target, np.asarray(array))
            return [*self._means(self._memory).values(), *(_next(token) for token in self.tokens(arrays))]

    def means(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """The means of arrays by name, in place where they can be changed."""
        with _alone(self.session):
            return self._means(arrays)

    def _means(self, arrays: dict[str, Any]) -> dict[str, Any]:
        if self.act is not None:
            self.act(arrays)
            return arrays
        if self.dense is None:
            result: dict[str, Any] = self.session.sync(arrays)
            return result
        found = dict(zip(arrays, wait_for([self.dense.push(name, array) for name, array in arrays.items()])))
        for name, mean in found.items():
            self.dense.require_finite(name, bool(np.isfinite(np.asarray(mean)).all()))
        return found

    def in_place(self, addresses: tuple[int, ...]) -> None:
        """Replace the arrays at these addresses by their means."""
        there, views = self._latest[0]
        if there != addresses:  # a program that is called again often has them where they were
            arrays = [_view(address, shape) for address, shape in zip(addresses, self.shapes)]
            views = dict(zip(self.names, arrays))
            self._latest[0] = addresses, views
        if self._kept_to_node or self.act is not None:
            self.means(views)
            return
        for array, mean in zip(views.values(), self.by_callback(*views.values())):
            np.copyto(array, mean)

    def tokens(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The token, if there is one."""
        return arrays[len(self.names) :]

    @property
    def results(self) -> list[jax.ShapeDtypeStruct]:
        """What a call returns."""
        return [*self.shapes, *([jax.ShapeDtypeStruct((), np.int32)] if self.counted else [])]

    def __call__(self, *arrays: Any) -> NoReturn:
        raise RuntimeError("a site is no callback")  # pragma: no cover - JAX holds it as one, and never calls it

    @cached_property
    def _latest(self) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        """The addresses of the latest call, and the arrays there by name."""
        return [((), {})]

    @cached_property
    def _kept_to_node(self) -> bool:
        """Whether no MPI message is written to the arrays: one that comes after an error would find them freed."""
        return self.session.topology.size == 1 or self.session.shares_memory

    @cached_property
    def _memory(self) -> dict[str, np.ndarray]:  # kept: new memory is slow
        return {name: np.empty(shape.shape, shape.dtype) for name, shape in zip(self.names, self.shapes)}


_busy: weakref.WeakKeyDictionary[Session, threading.Lock] = weakref.WeakKeyDictionary()


@contextmanager
def _alone(session: Session) -> Iterator[None]:
    """A call, at the same time as no other one of the session: ranks could take two in different orders.

    Raises:
        ConfigError: another one is under way. The session ends, on all ranks.
    """
    busy = _busy.setdefault(session, threading.Lock())
    if not busy.acquire(blocking=False):
        error = ConfigError(
            "sync: two calls of one session run at the same time, so ranks may take them in different orders and mix "
            "their gradients; order them by after= (docs/jax.md), or use a session for each thread"
        )
        session.__exit__(ConfigError, error, None)
        raise error
    try:
        yield
    finally:
        busy.release()


_sites: weakref.WeakValueDictionary[int, Site] = weakref.WeakValueDictionary()


def averaged(site: Site, arrays: list[Any]) -> list[Any]:
    """The means of arrays over the ranks, and the next token, in the program that is being traced, or at once."""
    with _MAKING:
        primitive = _primitive()
    if primitive is None:
        return _by_callback(*arrays, site=site)
    return list(primitive.bind(*arrays, site=site))


def _by_callback(*arrays: Any, site: Site) -> list[Any]:
    return list(io_callback(site.by_callback, site.results, *arrays, ordered=site.ordered))


def _next(token: Any) -> Any:
    return np.asarray(token) + np.int32(1)


def _view(address: int, shape: jax.ShapeDtypeStruct) -> np.ndarray:
    """An array over the program's memory, without a copy."""
    size = math.prod(shape.shape) * shape.dtype.itemsize
    if not size:
        return np.empty(shape.shape, shape.dtype)
    return np.frombuffer((ctypes.c_char * size).from_address(address), shape.dtype).reshape(shape.shape)


def _execute(call: abi.Call) -> None:
    """What a program calls."""
    site = _sites.get(call.number)
    if site is None:
        raise ConfigError("sync: this program was compiled by another process; compile it in this one")
    results = site.results
    count = len(results)
    args, rets = call.args[len(call.args) - count :], call.rets[len(call.rets) - count :]  # tokens come first
    for source, target, shape in zip(args, rets, results):
        if source != target:
            ctypes.memmove(target, source, math.prod(shape.shape) * shape.dtype.itemsize)
    site.in_place(tuple(rets))
    for token in site.tokens(rets):
        ctypes.c_int32.from_address(token).value += 1


_MAKING = threading.Lock()
"""XLA takes one handler of a name; two threads would register two."""


@lru_cache(maxsize=1)
def _primitive() -> Any:
    """The primitive; None if this version of JAX lacks what it needs."""
    try:
        problem = abi.register(_TARGET, _execute)
        if problem is None:
            return _made()
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # parts of JAX that change between versions
        problem = f"{type(error).__name__}: {error}"
    _LOG.warning(
        "espresso_mpi.jax: jax %s cannot make foreign-function calls of this library (%s): sync is an io_callback, "
        "which copies the gradients twice", jax.__version__, problem,
    )  # fmt: skip
    return None


def _made() -> Any:
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir

    (effect,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects
    (token,) = jax.make_jaxpr(jax.lax.create_token)().out_avals
    primitive = Primitive("espresso_mpi_sync")
    primitive.multiple_results = True
    primitive.def_impl(_now)
    primitive.def_effectful_abstract_eval(lambda *avals, site: (list(avals), {effect} if site.ordered else set()))

    by_callback = mlir.lower_fun(_by_callback)

    def lower(ctx: Any, *operands: Any, site: Site) -> Any:
        if getattr(ctx.module_context.axis_context, "num_devices", 0) != 1:  # each of several would call
            return by_callback(ctx, *operands, site=site)
        tokens = [token] if site.ordered else []
        before = [ctx.tokens_in.get(effect)] if site.ordered else []
        numbers = range(len(tokens), len(tokens) + len(operands))
        call = jax.ffi.ffi_lowering(
            _TARGET, has_side_effect=True, operand_output_aliases={number: number for number in numbers}
        )
        inner = dataclasses.replace(ctx, avals_in=[*tokens, *ctx.avals_in], avals_out=[*tokens, *ctx.avals_out])
        results = call(inner, *before, *operands, number=np.int64(site.number))
        if site.ordered:
            ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({effect: results[0]})))
        _sites[site.number] = site
        ctx.module_context.add_host_callback(site)  # lives as long as the executable, which no cache on disk gets
        return results[len(tokens) :]

    mlir.register_lowering(primitive, by_callback, cacheable=False)
    mlir.register_lowering(primitive, lower, platform="cpu", cacheable=False)
    ad.primitive_jvps[primitive] = _not_differentiated
    batching.primitive_batchers[primitive] = _not_mapped
    return primitive


def _now(*arrays: Any, site: Site) -> list[Any]:
    """Outside ``jit``: after the programs that still run, as they may call the session."""
    jax.effects_barrier()
    if site.act is not None:  # whose memory is used again
        return [jax.numpy.array(array) for array in site.by_callback(*arrays)]
    means = site.means(dict(zip(site.names, arrays))).values()
    return [*means, *(token + 1 for token in site.tokens(arrays))]


def _not_differentiated(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError("sync: cannot be differentiated; pass it the gradients: sync(jax.grad(f)(x))")


def _not_mapped(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError("sync: cannot be mapped by vmap; call it on the result: sync(jax.vmap(f)(x))")
