"""Arrays, layouts of nodes and means that tests of sessions share."""

from __future__ import annotations

import itertools

import numpy as np
from mpi4py import MPI

from espresso_mpi.types import ROUTES, Route

DENSE = ("flat", "hierarchical")
LINEAR = ("flat-linear", "hierarchical-linear")
COMPRESSED = tuple(name for name in ROUTES if name not in DENSE + LINEAR)


def node_layouts(size):
    """One node; pairs; every rank a node of its own; a big node and a small one."""
    pairs = [list(range(i, min(i + 2, size))) for i in range(0, size, 2)]
    lopsided = [list(range(size - 1)), [size - 1]]
    layouts = [[list(range(size))], pairs, [[r] for r in range(size)]] + ([lopsided] if size > 2 else [])
    return [layout for layout, _ in itertools.groupby(layouts)]


def layouts_seen_by(route, size):
    """The layouts of nodes that make a difference to a route: flat ones do not look at nodes. None: the default."""
    layouts = node_layouts(size)
    return layouts[:1] if route and "intra" not in str(Route.parse(route)) else layouts


def values(rank, step, n, dtype=np.float32):
    return np.random.default_rng([rank, step]).standard_normal(n).astype(dtype)


def exact_mean(size, step, n, dtype=np.float32):
    return np.mean([values(r, step, n, dtype).astype(np.float64) for r in range(size)], axis=0)


def summed(session, steps, first=0, *, shapes, pushes=False):
    """What came out and what went in, both summed over these steps, and the mean over the ranks of the latter."""
    world = MPI.COMM_WORLD
    out, wanted = ({name: np.zeros(shape) for name, shape in shapes.items()} for _ in range(2))
    for step in range(first, first + steps):
        every = [gradients(rank, step, shapes) for rank in range(world.size)]
        grads = every[world.rank]
        for name in shapes:
            wanted[name] += np.mean([g[name].astype(np.float64) for g in every], axis=0)
        if pushes:
            names = list(shapes) if world.rank % 2 == 0 else list(shapes)[::-1]
            handles = [session.push(name, grads[name]) for name in names]
            for handle in handles:
                handle.wait()
        else:
            session.sync(grads)
        for name in shapes:
            out[name] += grads[name]
    return out, wanted


def gradients(rank, step, shapes):
    rng = np.random.default_rng([rank, step])
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def identical(world, array):
    return len(set(world.allgather(array.tobytes()))) == 1


def held(world, session, n, nodes):
    """The mean that all residuals hold: first-pass ones averaged like gradients, second-pass ones as they are."""
    total = np.zeros(n)
    route_is_flat = world.size == 1 or not any("intra" in str(r) for r in session_routes(session))
    count = world.size if route_is_flat else len(nodes)
    for memory in world.allgather(session.state_dict()["arrays"]):
        for key, value in memory.items():
            point, region, what = key.rsplit("|", 3)[1:]
            if what != "residual":
                continue
            start, stop = map(int, region.split(":"))
            total[start:stop] += value.astype(np.float64) / (count if point == "0" else 1)
    return total


def session_routes(session):
    return [item.strategy.route for batch in session._intake.batches.values() for item in batch.items]
