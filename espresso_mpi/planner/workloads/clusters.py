"""Clusters that one does not have: a description in, a ``Profile`` by the textbook's formulas out.

A collective takes as long as its start-ups, one after the other, and then as long as the busier of two links: the one
of the rank that sends or receives most, and the network card of the node that does. So with h nodes of k ranks,
p = h·k, start-ups and seconds per byte α, β of a rank's link and α′, β′ of a card, everything at the efficiency e,

    t(s) = start + near·α + far·α′ + max(link·β, card·β′)/e · s

for s bytes that one rank puts in (``Profile.moves``). ``near`` and ``far`` count start-ups, ``link`` and ``card`` say
how often s crosses the busiest link or card in its busier direction. Inside a node of k ranks:

    operation        near       link        as
    allreduce        2(k-1)     2(k-1)/k    ring: reduce_scatter, then allgather of the k-th parts
    reduce_scatter   k-1        (k-1)/k     ring; each step passes on a k-th of s
    alltoall         k-1        (k-1)/k     of its k payloads a rank keeps one
    allgather        k-1        k-1         ring; each step passes on one contribution
    gather           k-1        k-1         to the root, whose link takes in all of them
    reduce           k-1        1           pipelined along a chain, in segments that are small against s
    broadcast        k-1        1           the same

(Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005; the chain is how NCCL
reduces and broadcasts.) Between nodes the same with h for k and far for near, and

- alone: one rank of each node takes part and has the card for itself: card = link.
- shared: k lanes cross at once: card = k·link. But the roots of the lanes are spread over the nodes, ⌈k/h⌉ at most
  on one and ⌊k/h⌋ at least. So for gather card = max(⌈k/h⌉(h-1), k - ⌊k/h⌋), what comes in or goes out; for reduce and
  broadcast every node passes on the data of all lanes but those whose chain ends there: card = k - ⌊k/h⌋.

Flat, over all p ranks in an order that visits node after node:

    alltoall         link (p-1)/p; k ranks send p-k of their p payloads through the card: card = k(p-k)/p.
                     near = k-1, far = p-k
    gather           link p-1; card p-k: what comes to the root's node. near = k-1, far = p-k
    all others       the same with p for k in ``link``; the ring or chain crosses each card once in each direction:
                     card = link. Of the p-1 start-ups of a round h-1 are between nodes, as NCCL's own model has it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, get_args

from msgspec import Meta

from espresso_mpi.cluster import environment
from espresso_mpi.compressors import Compressor, get
from espresso_mpi.errors import ConfigError
from espresso_mpi.files import schema
from espresso_mpi.files.schema import Ranks, Seconds
from espresso_mpi.types import CLOSING, DeviceKind, Level, Op

from ..model.curve import ZERO, Curve
from ..model.profile import Profile, check_ranks
from ..model.profile_keys import Codec, CopyDirection, Move

KIND = schema.Kind("espresso_mpi cluster", 1, "a person or Cluster.save; docs/cluster.md shows one")

MOST_BYTES = 1 << 20
"""Of a file: people write them; with the speeds of all compressors they have some 10 kB."""

Share = Annotated[float, Meta(gt=0, le=1)]
AboveZero = Annotated[float, Meta(gt=0, le=1e30)]

_ELEMENTS = 1 << 20
"""Elements between which a compressor's bytes per element are taken: large against headers and single blocks."""


@dataclass(frozen=True)
class Link:
    """A connection: ``alpha`` seconds per message, ``beta`` seconds per byte in each direction, both at once.

    Raises:
        ConfigError: one of them is negative or not finite.
    """

    alpha: Seconds
    beta: Seconds

    def __post_init__(self) -> None:
        schema.check(self, "link")

    @classmethod
    def gbit(cls, rate: float, alpha: float) -> Link:
        """A link of ``rate`` · 10⁹ bits per second."""
        return cls(alpha, 8e-9 / schema.convert(rate, AboveZero, "link: gbit"))


@dataclass(frozen=True)
class Speed:
    """A compressor on a device: seconds per call, and seconds per float32 element of an encode and of a decode.

    Raises:
        ConfigError: one of them is negative or not finite.
    """

    launch: Seconds
    encode: Seconds
    decode: Seconds

    def __post_init__(self) -> None:
        schema.check(self, "speed")


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device, from which the speed of compressors that work at its pace follows.

    Attributes:
        bandwidth: bytes per second, read and written, of the device.
        efficiency: share of it that compressors reach.
        launch: seconds that a call costs whatever its size.
        shared_by: ranks that use it at the same time.

    Raises:
        ConfigError: a value is out of its range.
    """

    bandwidth: AboveZero
    efficiency: Share
    launch: Seconds
    shared_by: Ranks = 1

    def __post_init__(self) -> None:
        schema.check(self, "memory")

    def speed(self, compressor: Compressor) -> Speed:
        """The speed of a compressor that moves the least bytes it must (``Compressor.encode_traffic``)."""
        rate = self.bandwidth * self.efficiency / self.shared_by
        return Speed(
            self.launch, _an_element(compressor.encode_traffic) / rate, _an_element(compressor.decode_traffic) / rate
        )


def _an_element(traffic: Callable[[int], int]) -> float:
    return (traffic(2 * _ELEMENTS) - traffic(_ELEMENTS)) / _ELEMENTS


@dataclass(frozen=True)
class Cluster:
    """A description of equal nodes.

    Attributes:
        name: what it is called.
        nodes: number of nodes.
        gpus_per_node: ranks on each, one per GPU where there are GPUs.
        intra: the link of each rank to the others of its node.
        inter: the network card of each node, which its ranks share.
        speeds: of compressors by (spec, device).
        memory: by device, for ``compressors`` that ``speeds`` does not name.
        compressors: specs.
        copy: between host and GPU memory, of each rank; None without GPUs.
        check: what a session does with each tensor before it travels, by its bytes; None: nothing.
        efficiency: share of the rates of ``intra``, ``inter`` and ``copy`` that operations reach.
        start: seconds that a collective costs besides its messages.
        call: as in ``Profile``, and so is ``tensor``.
        text: where the numbers come from.

    Raises:
        ConfigError: a value is out of its range, or a spec names no compressor.

    Example:
        >>> profile = espresso_mpi.planner.TESTBEDS["pcie-25g"].profile()  # of a cluster of the library
    """

    name: str
    nodes: Ranks
    gpus_per_node: Ranks
    intra: Link
    inter: Link
    speeds: Mapping[tuple[str, DeviceKind], Speed] = field(default_factory=dict)
    memory: Mapping[DeviceKind, DeviceMemory] = field(default_factory=dict)
    compressors: tuple[str, ...] = ()
    copy: Link | None = None
    check: Link | None = None
    efficiency: Share = 1.0
    start: Seconds = 0.0
    call: Seconds = 0.0
    tensor: Seconds = 0.0
    text: str = ""

    def __post_init__(self) -> None:
        schema.check(self, "cluster")
        check_ranks("cluster", nodes=self.nodes, gpus_per_node=self.gpus_per_node)
        for spec in (*self.compressors, *(spec for spec, _ in self.speeds)):
            get(spec)
        if self.compressors and not self.memory:
            raise ConfigError("cluster: compressors without memory; give the memory of a device, or speeds instead")

    # --- the profile ---

    def profile(self) -> Profile:
        """What its operations cost, by the formulas above."""
        return Profile(
            nodes=self.nodes,
            ranks_per_node=self.gpus_per_node,
            codecs=self._codecs(),
            moves=self._moves(),
            copies=self._copies(),
            check=Curve.line(self.check.alpha, self.check.beta) if self.check else ZERO,
            call=self.call,
            tensor=self.tensor,
            environment={"cluster": self.to_json()},
            fingerprint={
                "nodes": self.nodes,
                "ranks_per_node": self.gpus_per_node,
                "cluster": self.name,
                "espresso_mpi": environment.version("espresso-mpi"),
            },
            measured=False,
        )

    def _codecs(self) -> dict[Codec, Curve]:
        speeds = {(s, d): memory.speed(get(s)) for s in self.compressors for d, memory in self.memory.items()}
        curves: dict[Codec, Curve] = {}
        for (spec, device), speed in {**speeds, **self.speeds}.items():
            curves[spec, device, "encode"] = Curve.line(speed.launch, speed.encode)
            curves[spec, device, "decode"] = Curve.line(speed.launch, speed.decode)
        return curves

    def _moves(self) -> dict[Move, Curve]:
        kinds: list[tuple[Level, bool]] = [("flat", False)] if self.nodes * self.gpus_per_node > 1 else []
        kinds += [("intra", False)] if self.gpus_per_node > 1 else []
        kinds += [("inter", False), ("inter", True)] if self.nodes > 1 else []
        return {
            (op, *kind): self._curve(_traffic(op, self.nodes, self.gpus_per_node, *kind))
            for op in OPS
            for kind in kinds
        }

    def _curve(self, work: LinkTraffic) -> Curve:
        alpha = self.start + work.near * self.intra.alpha + work.far * self.inter.alpha
        return Curve.line(alpha, max(work.link * self.intra.beta, work.card * self.inter.beta) / self.efficiency)

    def _copies(self) -> dict[CopyDirection, Curve]:
        if self.copy is None:
            return {}
        line = Curve.line(self.copy.alpha, self.copy.beta / self.efficiency)
        return {"to_host": line, "to_gpu": line}

    # --- files ---

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON; keys of ``speeds`` such as ``onebit|gpu``."""
        speeds = {f"{spec}|{device}": speed for (spec, device), speed in self.speeds.items()}
        return {**KIND.header(), **schema.plain({**vars(self), "speeds": speeds})}

    @classmethod
    def from_json(cls, data: Any) -> Cluster:
        """What ``to_json`` made, or a person wrote: what has a default may be left out, and a link may say its rate as
        ``gbit`` in the place of ``beta``.

        Raises:
            ConfigError: it is of another kind or version, a key is missing or unknown, or a value does not fit.
        """
        found = vars(schema.convert(KIND.content(data), _Document, "cluster"))
        links = {name: link and link.value(f"cluster: {name}") for name, link in found.items() if name in _LINKS}
        for key in found["speeds"]:
            if "|" not in key:
                raise ConfigError(f"cluster: speeds: got the key {key!r}; expected one such as 'onebit|gpu'")
        speeds = {tuple(key.rsplit("|", 1)): speed for key, speed in found["speeds"].items()}
        return cls(**{**found, **links, "speeds": speeds})

    def save(self, path: str | Path) -> None:
        """Write it as JSON.

        Raises:
            ConfigError: the file cannot be written.
        """
        schema.write(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read it from JSON, or from TOML where the file is called so.

        Raises:
            ConfigError: the file cannot be read or describes no cluster.
        """
        return schema.load(path, cls.from_json, MOST_BYTES, _toml if Path(path).suffix == ".toml" else None)


@dataclass(frozen=True)
class _Link:
    """A link as a file says it: ``beta``, or ``gbit`` in its place."""

    alpha: Seconds
    beta: Seconds | None = None
    gbit: AboveZero | None = None

    def value(self, where: str) -> Link:
        if (self.beta is None) == (self.gbit is None):
            given = ", ".join(name for name, value in vars(self).items() if value is not None)
            raise ConfigError(f"{where}: got {given}; expected alpha, and either beta or gbit")
        return Link(self.alpha, self.beta or 0.0) if self.gbit is None else Link.gbit(self.gbit, self.alpha)


@dataclass(frozen=True)
class _Document:
    """The content of a file; the attributes are those of ``Cluster``."""

    name: str
    nodes: Ranks
    gpus_per_node: Ranks
    intra: _Link
    inter: _Link
    speeds: dict[str, Speed] = field(default_factory=dict)
    memory: dict[DeviceKind, DeviceMemory] = field(default_factory=dict)
    compressors: tuple[str, ...] = ()
    copy: _Link | None = None
    check: _Link | None = None
    efficiency: Share = 1.0
    start: Seconds = 0.0
    call: Seconds = 0.0
    tensor: Seconds = 0.0
    text: str = ""


_LINKS = ("intra", "inter", "copy", "check")


# --- the formulas -----------------------------------------------------------------------------------------------------

OPS: tuple[Op, ...] = get_args(Op)


@dataclass(frozen=True)
class LinkTraffic:
    """Start-ups inside and between nodes; how often a rank's bytes cross the busiest link and the busiest card."""

    near: float
    far: float
    link: float
    card: float


def _traffic(op: Op, nodes: int, ranks: int, level: Level, alone: bool) -> LinkTraffic:
    """What an operation consists of, by the table at the top."""
    if level == "inter":
        link = _passes(op, nodes)
        return LinkTraffic(0, _rounds(op) * (nodes - 1), link, _lanes(op, nodes, 1 if alone else ranks) * link)
    if level == "intra" or nodes == 1:
        return LinkTraffic(_rounds(op) * (ranks - 1), 0, _passes(op, ranks), 0)
    size = nodes * ranks
    if op == "alltoall":
        return LinkTraffic(ranks - 1, size - ranks, _passes(op, size), ranks * (size - ranks) / size)
    if op == "gather":
        return LinkTraffic(ranks - 1, size - ranks, _passes(op, size), size - ranks)
    link = _passes(op, size)
    return LinkTraffic(_rounds(op) * (size - nodes), _rounds(op) * (nodes - 1), link, link)


def _rounds(op: Op) -> int:
    """How often the data go around."""
    return 2 if op == "allreduce" else 1


def _passes(op: Op, members: int) -> float:
    """How often one rank's bytes cross the busiest link, in a group whose members have links of their own."""
    if op in CLOSING.values() or op in ("gather", "reduce"):
        return members - 1 if op in ("allgather", "gather") else 1
    return _rounds(op) * (members - 1) / members


def _lanes(op: Op, nodes: int, lanes: int) -> float:
    """How many times as much as its one lane's busiest link the busiest card carries, with roots that are spread."""
    least, most = lanes // nodes, -(-lanes // nodes)
    if op == "gather":
        return max(most, (lanes - least) / (nodes - 1))
    return lanes - least if op in ("reduce", "broadcast") else lanes


# --- reading ----------------------------------------------------------------------------------------------------------


def _toml(data: bytes) -> Any:
    if sys.version_info < (3, 11):
        raise ConfigError("TOML needs Python 3.11 or later; write the same keys as JSON, in a file named .json")
    import tomllib

    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # ValueError: of TOML and of UTF-8
        raise ConfigError(f"expected TOML; {error}") from None


# --- the testbeds of the paper ----------------------------------------------------------------------------------------

_METHODS = ("dgc:ratio=0.01", "onebit", "randomk:ratio=0.01", "topk:ratio=0.01", "fp16", "int8")
_SELECTING = ("dgc:ratio=0.01", "topk:ratio=0.01")

_TEXT = """\
8 nodes of 8 V100, {links}, cards of {card:g} Gbit/s: as in the paper (Espresso, EuroSys'23). A V100 has \
900 GB/s of HBM2 and 15.75 GB/s of PCIe 3 x16 each way: data sheets. A collective costs {start:g} us, a step between \
nodes {far:g} us, one inside {near:g} us: NCCL's own model of rings, protocol {protocol} (src/graph/tuning.cc of \
2020). Assumed: operations reach 88 % of a link; two sockets of six channels of DDR4-2666 reach 200 of 256 GB/s, \
shared by 8 ranks; every GPU has its PCIe lanes for itself. Compressors reach half of a GPU's bandwidth and 80 % of \
the CPU's; a call costs 2 us on a CPU, 8 us on a GPU, 20 us for dgc and topk, which launch several kernels: set \
so that the paper's scaling factors come out, within what is plausible; docs/cluster.md compares."""


def _testbed(name: str, links: str, protocol: str, start: float, intra: Link, inter: Link) -> Cluster:
    """8 nodes of 8 V100. ``start``: seconds a collective."""
    gpu = DeviceMemory(900e9, efficiency=0.5, launch=8e-6)
    near, far, card = intra.alpha * 1e6, inter.alpha * 1e6, 8e-9 / inter.beta
    return Cluster(
        name,
        nodes=8,
        gpus_per_node=8,
        intra=intra,
        inter=inter,
        speeds={(spec, "gpu"): replace(gpu, launch=20e-6).speed(get(spec)) for spec in _SELECTING},
        memory={"gpu": gpu, "cpu": DeviceMemory(200e9, efficiency=0.8, launch=2e-6, shared_by=8)},
        compressors=_METHODS,
        copy=Link(alpha=10e-6, beta=1 / 15.75e9),
        efficiency=0.88,
        start=start,
        text=_TEXT.format(links=links, protocol=protocol, start=start * 1e6, near=near, far=far, card=card),
    )


@lru_cache(maxsize=1)
def _testbeds() -> dict[str, Cluster]:
    """Start-ups are those of the protocol that NCCL takes for small messages there: large ones do not feel them."""
    nvlink, pcie = Link.gbit(1200, alpha=1.9e-6), Link.gbit(100, alpha=1.8e-6)
    fast, slow = Link.gbit(100, alpha=4.0e-6), Link.gbit(25, alpha=2.7e-6)
    beds = (
        _testbed("nvlink-100g", "NVLink of 1.2 Tbit/s per GPU", "LL128", 10e-6, nvlink, fast),
        _testbed("pcie-25g", "PCIe 3 x16 of about 100 Gbit/s per GPU", "LL", 3.6e-6, pcie, slow),
    )
    return {bed.name: bed for bed in beds}


class _Testbeds(Mapping[str, Cluster]):
    """Made when they are first asked for: their speeds follow from the compressors, which take a while to load."""

    def __getitem__(self, name: str) -> Cluster:
        return _testbeds()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_testbeds())

    def __len__(self) -> int:
        return len(_testbeds())


TESTBEDS: Mapping[str, Cluster] = _Testbeds()
"""The two clusters of the paper, ``nvlink-100g`` and ``pcie-25g``: 8 nodes of 8 V100 each."""
