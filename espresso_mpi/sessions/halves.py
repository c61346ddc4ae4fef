"""Reduce-scatter and allgather by a half of a route: how they are compressed, and what they keep."""

from __future__ import annotations

from dataclasses import replace

from .. import compressors
from ..collectives.data.layout import Topology
from ..collectives.halves import Half, by_nodes, check_half, default_half_route, encodes
from ..collectives.messages.agreement import fingerprint
from ..collectives.store_keys import BY_NODES
from ..compressors import Compressor
from ..engine.batches import Batch, Item
from ..errors import ConfigError
from ..feedback import NO_FEEDBACK, Feedback
from ..options import Options
from ..types import ITEMSIZE, Route, Strategy, TensorSpec


def half_of(
    half: Half,
    given: TensorSpec,
    whole: TensorSpec,
    op: str,
    topology: Topology,
    name: str,
    compressor: str,
    route: str | Route | None,
    feedback: Feedback | str | bool,
) -> Batch | None:
    """A call by a half of a route; None: neither a compressor nor a route is asked for, or there is but one rank.

    Args:
        given: of the array that is read; whole: of the parts of all ranks.

    Raises:
        ConfigError: the arguments do not go together.
    """
    if compressor in (None, "none") and route is None:
        return None
    if op not in ("mean", "sum") or whole.dtype not in ITEMSIZE:
        raise ConfigError(
            f"{half}: compressor={compressor!r}, route={str(route)!r} with op={op!r} of {whole.dtype}; only mean and "
            f"sum of floating-point numbers are compressed or take a route; leave them out"
        )
    options, problem = Options.checked(compressor=compressor, route=route, feedback=feedback, min_bytes=0)
    if problem:
        raise ConfigError(f"{half}: {problem}")
    chosen = options.route or Route.parse(default_half_route(topology)).on(whole.device)
    strategy = Strategy(options.compressor, chosen)
    check_half(half, chosen, topology)
    method = _method(half, strategy, whole)
    how = NO_FEEDBACK if method is None else options.feedback.resolved(method, whole.size)
    if how != NO_FEEDBACK and not name:
        raise ConfigError(f"{half}: feedback={str(how)!r} without a name; the residual is kept under it: pass name=")
    if topology.size == 1 and (method is None or (method.averages and how.momentum == 1)):
        return None
    kept = f"{half} {name}".strip() + (BY_NODES if by_nodes(chosen) else "")
    named = replace(whole, name=kept)
    item = Item(1, named, strategy, method, how, total=op == "sum", half=half)
    said = [half, op, options.compressor, str(chosen), str(how)]
    digest = fingerprint([said, kept, list(given.shape), given.dtype, given.device])
    return Batch((replace(given, name=kept),), (item,) if whole.size else (), digest, exact=method is None)


def _method(half: Half, strategy: Strategy, whole: TensorSpec) -> Compressor | None:
    """What compresses in this half; None: nothing does."""
    route = strategy.route
    if strategy.compressor == "none":
        return None
    if not encodes(half, route):
        raise ConfigError(
            f"{half}: route {str(route)!r} does not encode in its {'first' if half == 'reduce_scatter' else 'second'} "
            f"half, which is the {half}; use 'flat-alltoall', or compressor='none'"
        )
    method = compressors.get(strategy.compressor).shaped(whole.shape)
    if half == "allgather" and encodes("reduce_scatter", route):
        method = method.second_pass()
    if half == "allgather" and not method.averages:
        raise ConfigError(
            f"allgather: the result of compressor {str(method)!r} is no approximation of what it compresses; use "
            f"another one such as 'onebit' or 'topk'"
        )
    return method
