"""What becomes of ready times when communication runs beside the backward pass.

A trace says when gradients are there if nothing but the backward pass runs. A timeline lets communication run beside it
for nothing. Where ranks and the threads that communicate share cores, less than that is hidden: the profile says which
share (``Profile.hidden``), by how much the backward pass gets longer (``slowed``), and what a push costs (``pushed``).
"""

from __future__ import annotations

from dataclasses import replace

from .profile import Profile
from .trace import Trace


def beside(trace: Trace, profile: Profile) -> Trace:
    """The trace as a timeline is to see it on this cluster.

    With r the ready times, C the last of them and h the hidden share, a tensor is ready at C - h · (C - r): h = 1
    leaves the trace as it is, h = 0 has all tensors ready at the end, where nothing can be hidden. By what pushes and
    the slower backward pass take all are ready later: nothing hides behind that. Slower is what follows the first
    gradient. A trace whose tensors are all ready at the same time was synchronised at the end: it stays. So does one of
    a GPU, where the backward pass leaves the cores to those that communicate.
    """
    first, end = trace.tensors[0].ready, trace.tensors[-1].ready
    cost = profile.pushed * len(trace.tensors) + profile.slowed * (end - first)
    if first == end or trace.device == "gpu" or (profile.hidden == 1 and cost == 0):
        return trace
    tensors = tuple(
        replace(tensor, ready=cost + end - profile.hidden * (end - tensor.ready)) for tensor in trace.tensors
    )
    return replace(trace, tensors=tensors)
