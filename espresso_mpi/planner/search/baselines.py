"""What one would do without a planner: plans that imitate common and published systems, to compare with.

Each is a rule that looks at one tensor at a time, and none knows what overlaps with what. They run in our executor and
are priced by our timeline, so what differs between two of them is the strategy alone; the systems that they are named
after also differ in their kernels, in how they cut and fuse tensors, and in the order in which they send. Those that
are named after a system keep its published scheme; the others take of the named routes the one that suits the profile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from espresso_mpi import compressors
from espresso_mpi.errors import ConfigError
from espresso_mpi.types import DeviceKind, Plan, Route, Strategy

from ..model.problem import Problem
from ..model.profile import Profile
from ..model.timeline import Lanes, Order
from ..model.tree import named_routes
from ..model.tree import routes as all_routes
from ..model.workload import Workload
from .algorithms import reachable
from .search import search

BYTEPS_SMALLEST = 1 << 16
"""Bytes below which BytePS leaves a tensor as it is, unless told otherwise (BYTEPS_MIN_COMPRESS_BYTES)."""


@dataclass(frozen=True)
class Case:
    """What a baseline decides about: the step, the cluster, the compressor, and how the timeline is to be."""

    workload: Workload
    profile: Profile
    compressor: str
    lanes: Lanes | str = "one-network"
    order: Order = "schedule"

    @property
    def hierarchical(self) -> bool:
        """Whether several nodes have several ranks each."""
        return self.profile.nodes > 1 and self.profile.ranks_per_node > 1

    @property
    def dense(self) -> Strategy:
        """How a session sends what is not compressed."""
        return Strategy("none", Route.parse("hierarchical" if self.hierarchical else "flat"))

    def along(self, scheme: str, device: DeviceKind, compressor: str = "") -> Strategy:
        """Compressed along the hierarchical or flat route of this name."""
        route = Route.parse(f"{'hierarchical' if self.hierarchical else 'flat'}-{scheme}").on(device)
        return Strategy(compressor or self.compressor, route)

    def usual(self, device: DeviceKind, compressor: str = "") -> Strategy:
        """Compressed on a device, by the named route that makes the step shortest if all tensors take it.

        Of equal ones the first in ``types.ROUTES``. Payloads that have something in common are summed: what is decoded
        and encoded anew on other routes would lose as much again, and that has no price here.
        """
        spec = compressor or self.compressor
        method = compressors.get(spec)
        named = [r.on(device) for r in named_routes(method, self.hierarchical) if r.sums_payloads or not method.common]
        problem = Problem.of(self.workload, self.profile, [spec], routes=named, lanes=self.lanes, order=self.order,
                             prune=False)  # fmt: skip
        strategies = [Strategy(spec, route) for route in named]
        options = [np.array([problem.option(i, strategy) for i in range(problem.tensors)]) for strategy in strategies]
        return strategies[int(np.argmin([problem.seconds(option) for option in options]))]

    def everywhere(self, strategy: Strategy) -> Plan:
        """The plan in which every tensor has the same strategy."""
        return Plan({tensor.name: strategy for tensor in self.workload.tensors})

    def quicker(self, *strategies: Strategy) -> Plan:
        """The plan in which every tensor has the strategy that is quickest by itself; of equal ones the first."""
        routes = tuple(dict.fromkeys(s.route for s in strategies))
        specs = tuple(dict.fromkeys(s.compressor for s in strategies))
        problem = Problem.of(self.workload, self.profile, specs, routes=routes, lanes=self.lanes, order=self.order,
                             prune=False)  # fmt: skip
        tensors = {number: tensor for tensor, number in enumerate(problem.set_of.tolist())}
        options = {number: [problem.option(tensor, s) for s in strategies] for number, tensor in tensors.items()}
        best = {number: option[int(np.argmin(problem.alone[option]))] for number, option in options.items()}
        return self.plan(problem, [best[number] for number in problem.set_of.tolist()])

    def plan(self, problem: Problem, choice: Iterable[int]) -> Plan:
        """The plan of a choice, with the compressor as it was given: a problem knows schedules only by their end."""
        options = list(choice)
        routes = {option: problem.routes[problem.route[option]] for option in dict.fromkeys(options)}
        strategies = {
            option: Strategy(self.compressor if at.compressed else "none", at) for option, at in routes.items()
        }
        return Plan({tensor.name: strategies[option] for tensor, option in zip(self.workload.tensors, options)})


# --- the baselines ----------------------------------------------------------------------------------------------------


def fp32(case: Case) -> Plan:
    """Nothing compressed: what most users run, Horovod and DDP over NCCL or MPI.

    Hierarchical where several nodes have several ranks, else flat. Those fuse small tensors into buffers of some
    25 to 64 MB; here every tensor travels by itself.
    """
    return case.everywhere(case.dense)


def fp16(case: Case) -> Plan:
    """Every tensor as float16, on the device it is on: the fair rival of any compressor.

    "Beyond Throughput and Compression Ratios" (HotNets'24) asks for this comparison. All tensors take one route: of the
    named ones, those that sum payloads among them, the one by which this step is shortest on this cluster.
    """
    return case.everywhere(case.usual(case.workload.device, "fp16"))


def everything_gpu(case: Case) -> Plan:
    """Every tensor compressed on the GPU, whatever its size, all by the named route that makes this step shortest."""
    return case.everywhere(case.usual("gpu"))


def everything_cpu(case: Case) -> Plan:
    """Every tensor compressed on the CPU, whatever its size, all by the named route that makes this step shortest."""
    return case.everywhere(case.usual("cpu"))


def myopic(case: Case) -> Plan:
    """Every tensor by its own quickest strategy, as if it were alone: the choice by size.

    The paper's ablation (EuroSys'23) compresses a tensor if that shortens its own communication by more than
    it takes. This takes the best of all strategies on one device, dense or compressed, so it is a little stronger.
    """
    routes = reachable() if case.workload.device == "gpu" else all_routes(("cpu",))
    problem = Problem.of(case.workload, case.profile, [case.compressor], routes=routes, lanes=case.lanes,
                         order=case.order, prune=False)  # fmt: skip
    return case.plan(problem, problem.quickest(np.ones(problem.method.size, bool)))


def hipress(case: Case) -> Plan:
    """Like HiPress (Bai et al., SOSP'21): GPU compression where a tensor's own synchronisation gets cheaper by it.

    Its CaSync with parameter servers on all nodes is the divisible scheme: pieces of a tensor are compressed,
    brought to their owners, decoded, summed, compressed again and handed to all; inside the node data is dense. Its
    cost model also chooses into how many pieces a tensor is cut, and it batches kernels and small messages; here a
    tensor has as many pieces as owners.
    """
    return case.quicker(case.dense, case.along("alltoall", "gpu"))


def hitopkcomm(case: Case) -> Plan:
    """Like HiTopKComm (Shi et al., MLSys'21): every tensor, summed inside the node, compressed on the GPU, gathered.

    Reduce-scatter inside the node, an allgather of payloads between nodes, an allgather of the sums inside. It is
    made for top-k by its own approximate selection; here it takes the compressor that it is given.
    """
    return case.everywhere(case.along("allgather", "gpu"))


def byteps_compress(case: Case) -> Plan:
    """Like BytePS-Compress (Zhong et al., 2021): compression on the CPU, push to and pull from servers on all nodes.

    Dense inside the node; between nodes every piece is compressed and pushed to its owner (alltoall), who decodes
    all, sums, compresses once more, and from whom all pull it (allgather). Tensors below 65536 bytes stay dense, its
    default. BytePS cuts tensors into pieces of 4 MB and sends by priority; here a tensor has as many pieces as owners.
    """
    packed, small = case.along("alltoall", "cpu"), case.dense
    return Plan({t.name: packed if t.nbytes >= BYTEPS_SMALLEST else small for t in case.workload.tensors})


BASELINES: Mapping[str, Callable[[Case], Plan]] = {
    "fp32": fp32,
    "fp16": fp16,
    "everything-gpu": everything_gpu,
    "everything-cpu": everything_cpu,
    "myopic": myopic,
    "hipress": hipress,
    "hitopkcomm": hitopkcomm,
    "byteps-compress": byteps_compress,
}
"""The baselines by name."""

NEEDS_GPU = frozenset({"everything-gpu", "hipress", "hitopkcomm"})
"""Those that compress on the GPU, and so need tensors there."""


def baseline(
    name: str, workload: Workload, profile: Profile, compressor: str, *, lanes: Lanes | str = "one-network",
    order: Order = "schedule",
) -> Plan:  # fmt: skip
    """The plan of a baseline.

    Args:
        name: in ``BASELINES``; compressor: what it compresses with.

    Raises:
        ConfigError: there is no such baseline, it needs tensors on a GPU, the compressor is unknown or "none", or the
            profile lacks what it compares.
    """
    if name not in BASELINES:
        raise ConfigError(f"baseline {name!r}: there is none of that name; expected one of {', '.join(BASELINES)}")
    if name not in usable(workload):
        raise ConfigError(
            f"baseline {name!r}: compresses on the GPU, and the tensors of this workload are in host memory; expected "
            f"one of {', '.join(usable(workload))}"
        )
    if compressor == "none":
        raise ConfigError("baseline: compressor 'none' compresses nothing; name one, such as topk:ratio=0.01")
    compressors.get(compressor)
    return BASELINES[name](Case(workload, profile, compressor, lanes, order))


def usable(workload: Workload) -> tuple[str, ...]:
    """The names of the baselines that a workload's tensors can travel by."""
    return tuple(name for name in BASELINES if workload.device == "gpu" or name not in NEEDS_GPU)


def upper_bound(
    workload: Workload,
    profile: Profile,
    compressor: str,
    *,
    lanes: Lanes | str = "one-network",
    order: Order = "schedule",
) -> float:
    """Seconds of a step if compression took no time and disturbed nothing: the Upper Bound of the paper on throughput.

    The best that the search finds with free encodes and decodes; nothing is copied between devices, as all is done
    where the tensors are. No plan reaches it, and none with this compressor is below it by more than the search's gap.

    Raises:
        ConfigError: the profile lacks what is needed.
    """
    linear = compressors.get(compressor).linear
    problem = Problem.of(workload, profile, [compressor], routes=all_routes((workload.device,), linear), lanes=lanes,
                         order=order, free_codecs=True)  # fmt: skip
    return search(problem).seconds
