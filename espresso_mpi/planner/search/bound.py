"""Lower bounds on the time of a step, over all choices: what no planner can beat.

A step is a longest path. In the order ``backprop`` the lanes' free times after a tensor are those before it times a
max-plus matrix of its option (see ``dominance.matrices``), so F(S) is the longest path through one layer of nodes for
every tensor: the virtual lanes, and *done*. A *network* is such layers; it is *valid* if no choice takes less time than
the longest path along its edges.

**Claim 1.** For every unit flow y through a valid network, F(S) is at least the sum over tensors i of the least over
options o of <y_i, M_{i,o}>, plus what the flow collects of the backward pass. Proof: a unit flow is a mixture of paths;
the longest path is at least as long as their mean, which is the sum over tensors of <y_i, M_{i,S_i}>; and each term is
at least its least.

**Claim 2.** Leaving out edges keeps a network valid: there are fewer paths. So a tensor's edges are those that all of
its options have.

**Claim 3** (``exact_network``). Every lane can be left for *done* at the cost of ``excess``, the most by which an
option leaves the lane later than the tensor is there. Proof: the tensor that visited a lane last was there at least
that early, and *done* is the latest of all.

**Claim 4** (``exact_network``). The lane of the backward pass has the edges of all lanes. Proof: no operation of a
tensor, or of a later one, begins before its gradient is ready. So F stays the same if all lanes that are free earlier
count as busy until then.

**Claim 5** (``load_network``, for the other orders). Work of a tensor begins when its backward pass has ended; a lane
does one thing at a time; the backward pass is work of its lane. So F is at least the backward pass up to a tensor, and
from there on the load of all later tensors on any one lane; and at least the end of the backward pass up to a tensor
and the length of one of its segments. In the order ``backprop`` the same holds where no option has several segments: a
lane is free after the loads of all its visitors, and by claim 3 no later than the last of them is there. With segments
it holds for first and later visits of a lane apart, and for the lane of the backward pass, whose end F waits for.

Bounds are lowered by 1e-9 of themselves, far more than what rounding can add up to.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..model.problem import Problem
from ..model.timeline import OptionTable
from .game import Relaxation, relaxed
from .networks import Network, exact_network, network_of

SAFETY = 1e-9
"""Relative: sums of some ten thousand terms in float64 are off by less than 1e-11."""


def lower_bound(problem: Problem) -> float:
    """Seconds that no choice of the problem's options falls below, whatever the search: certified.

    It comes from the exact network in the order ``backprop``, else from the network of loads; see the module for the
    proofs. In the order ``backprop`` it also holds for dominated options that were left out: they are never better. In
    the others it does so where nothing has several segments: a matrix that is nowhere lower has no lower load and no
    shorter chain.
    """
    quick = problem.quickest(np.ones(problem.method.size, bool))
    return certified(relaxed(network_of(problem), quick).value) + problem.around


def certified(value: float) -> float:
    """A bound less what rounding may have added; times are never negative."""
    return max(0.0, value - SAFETY * abs(value))


def branched(
    problem: Problem, full: np.ndarray, relaxation: Relaxation, best: np.ndarray, time: float, most: int
) -> float:
    """The bound when the tensor whose options mix most may not mix them, in seconds like ``Relaxation.value``.

    Claim: the least over the options of one tensor of bounds in which it has this option alone is a bound. An option
    that lifts the flow's cost by r cannot be had below the bound plus r; so those come first that lift it least.

    Args:
        full: of ``matrices``; best: a choice, time: its F: no bound is wanted above it.
        most: options to try; with more of them left, nothing is tried.
    """
    flow, network = relaxation.flows[0], relaxation.network
    tensor = int(np.argmax(relaxation.game.spread()))
    options, used = np.array(problem.options(tensor)), flow.flow[tensor] > 0
    above = flow.flow[tensor][used] @ network.weight[used, options[0] : options[-1] + 1]
    above -= above.min()
    order = np.argsort(above, kind="stable")
    order = order[above[order] < time - flow.value]
    if order.size > most:
        return flow.value
    alone = _each_alone(problem, full, options[order])
    found = time
    for place, option in enumerate(order):
        if flow.value + above[option] >= found:
            break
        set_of, choice = problem.set_of.copy(), best.copy()
        set_of[tensor], choice[tensor] = problem.first.size - 1 + place, problem.method.size + place
        found = min(found, relaxed(replace(alone, set_of=set_of), choice, rounds=11, heat=0.004, cooling=0.65).value)
    return max(flow.value, found)


def _each_alone(problem: Problem, full: np.ndarray, options: np.ndarray) -> Network:
    """The exact network with one more candidate set for each of some options, which is all that is on it."""
    o, index = problem.timeline.options, np.concatenate([np.arange(problem.method.size), options])
    first = np.concatenate([problem.first, problem.first[-1] + 1 + np.arange(options.size)])
    table = OptionTable(o.lane[index], o.seconds[index], o.count[index], o.repeats[index])
    wider = replace(problem, timeline=replace(problem.timeline, options=table), first=first,
                    method=problem.method[index], route=problem.route[index])  # fmt: skip
    return exact_network(wider, full[index])
