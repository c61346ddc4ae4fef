"""The effect of communication that runs beside the backward pass and takes cores from it.

A workload says when gradients are ready if nothing but the backward pass runs. In a timeline, communication beside it
costs nothing. Where ranks and the threads that communicate share cores, less is hidden. The profile says which share is
hidden (``Profile.hidden``), by how much the backward pass gets longer (``slowed``), and by how much each tensor or
buffer that travels by itself costs more (``pushed``).
"""

from __future__ import annotations

from dataclasses import replace

from .profile import Profile
from .workload import Workload


def beside(workload: Workload, profile: Profile) -> tuple[Workload, Profile]:
    """The workload and the profile as a timeline is to see them on this cluster.

    With r the ready times, C the last of them and h the hidden share, a tensor is ready at C - h · (C - r): h = 1
    leaves the workload as it is, h = 0 has all tensors ready at the end, where nothing can be hidden. All are later by
    what is added to the backward pass after the first gradient. Where all tensors are ready at the same time they
    were synchronised at the end, and nothing changes; nor does it on a GPU, where the backward pass leaves the cores to
    those that communicate.
    """
    first, end = workload.tensors[0].ready, workload.tensors[-1].ready
    if first == end or workload.device == "gpu":
        return workload, profile
    dearer = replace(profile, tensor=profile.tensor + profile.pushed, pushed=0.0, hidden=1.0, slowed=0.0)
    if profile.hidden == 1 and profile.slowed == 0:
        return workload, dearer
    later = end + profile.slowed * (end - first)
    tensors = tuple(replace(tensor, ready=later - profile.hidden * (end - tensor.ready)) for tensor in workload.tensors)
    return replace(workload, tensors=tensors), dearer
