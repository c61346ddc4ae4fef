"""Buffers: neighbours in the backward pass that travel together, and the problem whose tensors they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from espresso_mpi.types import ITEMSIZE, Route, buffer_name

from ..model.candidates import CandidateSet
from ..model.fusion import fused
from ..model.problem import Problem
from ..model.profile import Profile
from ..model.timeline import Lanes, Order
from ..model.workload import Workload, WorkloadTensor

Groups = tuple[tuple[str, ...], ...]

Kind = tuple[int, str, tuple[str, ...]]
"""What the candidates of a buffer depend on: elements, their type, and what it may not travel by."""

Cut = tuple[int, ...]
"""Where buffers begin among the tensors of a workload; the first is 0."""


def kind_of(buffer: WorkloadTensor) -> Kind:
    """What the candidates of a buffer depend on."""
    return buffer.size, buffer.dtype, buffer.barred


def joined(workload: Workload, limit: int) -> Cut:
    """Neighbours of one element type joined until a buffer has ``limit`` bytes."""
    begins, held, kind = [], limit, ""
    for place, tensor in enumerate(workload.tensors):
        if held >= limit or tensor.dtype != kind:
            begins.append(place)
            held, kind = 0, tensor.dtype
        held += tensor.size * ITEMSIZE[tensor.dtype]
    return tuple(begins)


class Buffers:
    """Cuts of a workload into buffers, each of them priced once."""

    def __init__(
        self, workload: Workload, profile: Profile, compressors: tuple[str, ...], routes: Sequence[Route] | None,
        lanes: Lanes | str, order: Order,
    ) -> None:  # fmt: skip
        self.workload, self.profile, self.compressors = workload, profile, compressors
        self.routes, self.lanes, self.order = routes, lanes, order
        self.candidates: dict[Kind, CandidateSet] = {}
        self.known: dict[tuple[int, int], WorkloadTensor] = {}
        self.problems: dict[Cut, Problem] = {}
        self.priced: Problem | None = None

    def groups(self, cut: Cut) -> Groups:
        """Names of the tensors that share a buffer."""
        return tuple(tuple(t.name for t in members) for members in self.members(cut) if len(members) > 1)

    def members(self, cut: Cut) -> list[tuple[WorkloadTensor, ...]]:
        """Of each buffer its tensors."""
        return [self.workload.tensors[a:b] for a, b in zip(cut, (*cut[1:], len(self.workload.tensors)))]

    def buffer_tensors(self, cut: Cut) -> tuple[WorkloadTensor, ...]:
        """The buffers of a cut, named by the places of their first tensor and that after the last."""
        return tuple(map(self._buffer, cut, (*cut[1:], len(self.workload.tensors))))

    def _buffer(self, begin: int, end: int) -> WorkloadTensor:
        if (begin, end) not in self.known:
            members = self.workload.tensors[begin:end]
            self.known[begin, end] = WorkloadTensor.joined(f"{begin}:{end}", members)
        return self.known[begin, end]

    def named(self, cut: Cut, choice: np.ndarray) -> tuple[Problem, np.ndarray]:
        """The problem whose tensors are the buffers of a cut by their own names, and the choice in it."""
        workload, members = fused(self.workload, self.groups(cut)), self.members(cut)
        names = [buffer_name([t.name for t in own]) if len(own) > 1 else own[0].name for own in members]
        places = {name: number for number, name in enumerate(names)}
        order = np.array([places[tensor.name] for tensor in workload.tensors])  # of equal ready times others come first
        problem = self.problem(cut)
        firsts = [problem.workload.tensors[number] for number in np.unique(problem.set_of, return_index=True)[1]]
        sets = {number: self.candidates[kind_of(buffer)] for number, buffer in enumerate(firsts)}
        return problem.with_sets(workload, sets, problem.set_of[order].tolist()), choice[order]

    def price(self, cuts: Iterable[Cut]) -> None:
        """Candidates for all buffers of some cuts."""
        kinds = {kind_of(buffer) for cut in cuts for buffer in self.buffer_tensors(cut)}
        missing = sorted(kinds - self.candidates.keys())
        if not missing and self.priced is not None:
            return
        alike = tuple(WorkloadTensor(str(n), size, 0.0, kind, (), bars) for n, (size, kind, bars) in enumerate(missing))
        self.priced = Problem.of(replace(self.workload, tensors=alike), self.profile, self.compressors,
                                 routes=self.routes, lanes=self.lanes, order=self.order)  # fmt: skip
        self.candidates |= {kind: self.priced.candidates_of(number) for number, kind in enumerate(missing)}

    def problem(self, cut: Cut) -> Problem:
        """The problem whose tensors are the buffers of a cut; see ``buffer_tensors``."""
        if cut not in self.problems:
            self.price([cut])
            assert self.priced is not None
            tensors = self.buffer_tensors(cut)
            kinds = [kind_of(buffer) for buffer in tensors]
            workload = replace(self.workload, tensors=tensors)
            self.problems[cut] = self.priced.with_sets(workload, {kind: self.candidates[kind] for kind in kinds}, kinds)
        return self.problems[cut]

    def more(self, cut: Cut) -> list[Cut]:
        """One buffer cut in the middle of its bytes, the largest first."""
        found = []
        for number, members in enumerate(self.members(cut)):
            sizes = np.cumsum([tensor.size for tensor in members])
            if len(members) > 1:
                middle = cut[number] + min(len(members) - 1, 1 + int(np.searchsorted(sizes, sizes[-1] / 2)))
                found.append((int(sizes[-1]), (*cut[: number + 1], middle, *cut[number + 1 :])))
        return [other for _, other in sorted(found, key=lambda pair: -pair[0])]


def alike(buffers: Sequence[tuple[WorkloadTensor, ...]]) -> bool:
    """Whether all tensors of some buffers have one element type."""
    return len({tensor.dtype for members in buffers for tensor in members}) == 1
