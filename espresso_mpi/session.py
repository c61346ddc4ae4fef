"""The session: a communicator, a strategy for every tensor, the residuals, and ``sync``."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import buffers, compressors, device
from .buffers import Gradient
from .collectives import reduction
from .collectives.agreement import differences, fingerprint
from .collectives.executor import Clock, Job, Program
from .collectives.layout import Topology
from .collectives.transport import MESSAGE_BYTES, Transport, available_cores
from .errors import (
    ConfigError,
    EspressoError,
    GradientError,
    MismatchError,
    NonFiniteError,
    PlanError,
    StateError,
)
from .options import DEFAULT_SEGMENT, DEFAULT_TIMEOUT, Options
from .types import Plan, Route, Strategy, TensorSpec
import itertools

STATE_VERSION = 1
_LOG = logging.getLogger("espresso_mpi")


@dataclass(frozen=True)
class Stats:
    """What a session did so far, on this rank.

    ``seconds`` is the time inside ``sync``; ``seconds_by`` splits it: check (adopting arrays, looking for NaN), agree,
    encode, wire (collectives with their sums and waits), decode. ``bytes_by_level`` counts bytes sent to other ranks
    inside the machine and between machines; ``skipped`` the steps that a tensor sat out because it was not finite.
    """

    steps: int
    seconds: float
    seconds_by: Mapping[str, float]
    bytes_by_level: Mapping[str, int]
    skipped: Mapping[str, int]

    @property
    def wire_bytes(self) -> int:
        """Bytes sent to other ranks, on all levels."""
        return sum(self.bytes_by_level.values())


@dataclass(frozen=True)
class _Bucket:
    """Tensors that travel together: one, or several small dense ones of the same type side by side."""

    members: tuple[int, ...]
    strategy: Strategy
    specs: tuple[TensorSpec, ...]

    @property
    def name(self) -> str:
        return self.specs[0].name

    @property
    def size(self) -> int:
        return sum(spec.size for spec in self.specs)


@dataclass(frozen=True)
class _Batch:
    """What is known about one list of tensor descriptions: prepared once, used at every step that brings it."""

    specs: tuple[TensorSpec, ...]
    buckets: tuple[_Bucket, ...]
    digest: bytes


class Session:
    """Averages gradients over the ranks of a communicator.

    Args:
        comm: mpi4py intracommunicator, default ``MPI.COMM_WORLD``; it is duplicated.
        compressor: spelling of a compressor such as ``"topk:ratio=0.01"``, or ``"none"``.
        route: name or spelling of a Route; default: hierarchical where machines have several ranks, else flat.
        plan: a Plan with a strategy for every tensor, instead of compressor and route.
        seed: of stochastic compressors; the same on every rank.
        min_bytes: tensors below this many bytes stay dense and travel together.
        timeout: seconds after which a rank that does not come is reported.
        feedback: keep what compression loses and add it in the next step (error feedback, decay 1).
        nonfinite: a NaN or an infinity in a gradient on any rank: ``"raise"`` NonFiniteError on all ranks, or
            ``"skip"`` the tensor in this step: it becomes zero on all ranks and its residual stays as it was.
        window_bytes: half of a rank's share of the machine's shared memory window; 0 uses MPI messages instead.
        message_bytes: longest message between machines; longer ones are cut.
        segment_bytes: a tensor with more bytes than this between machines is cut into segments that follow each other
            along the route, so that one's sums hide behind another's messages; 0 leaves it whole. Compressors that
            choose (topk) choose in each segment.
        machines: groups of ranks to treat as machines, such as the sockets of one; default: as MPI finds them.

    Raises:
        ConfigError: an option does not fit; MismatchError: ranks chose different options; on every rank.
    """

    def __init__(
        self,
        comm: Any = None,
        *,
        compressor: str = "none",
        route: str | Route | None = None,
        plan: Plan | None = None,
        seed: int = 0,
        min_bytes: int = 16384,
        timeout: float = DEFAULT_TIMEOUT,
        feedback: bool = True,
        nonfinite: str = "raise",
        window_bytes: int = 4 << 20,
        message_bytes: int = MESSAGE_BYTES,
        segment_bytes: int = DEFAULT_SEGMENT,
        machines: Sequence[Sequence[int]] | None = None,
    ) -> None:
        options, problem = Options.checked(
            compressor=compressor, route=route, plan=plan, seed=seed, min_bytes=min_bytes, timeout=timeout,
            feedback=feedback, nonfinite=nonfinite, window_bytes=window_bytes, message_bytes=message_bytes,
            segment_bytes=segment_bytes,
            machines=machines,
        )  # fmt: skip
        self._options = options
        self._transport = Transport.open(comm, options.transport())
        self._usable, self._why_not = True, ""
        self._step = 0
        self._residuals: dict[str, Any] = {}
        self._batches: dict[tuple[TensorSpec, ...], _Batch] = {}
        self._programs: dict[tuple[str, str, int, str], Program] = {}
        self._clock = Clock()
        self._clock.seconds.update(check=0.0, agree=0.0)
        self._skipped: Counter[str] = Counter()
        self._seconds = 0.0
        self._agree_on_options(problem)
        _limit_threads(len(self._transport.machine))

    # --- synchronising ------------------------------------------------------------------------------------------------

    def sync(self, grads: Any) -> Any:
        """Replace every array by its mean over the ranks.

        Args:
            grads: one array, or lists, tuples and dicts of them, nested as you like; None entries are allowed where all
                ranks have them. numpy, CuPy, torch, or anything with DLPack or the CUDA array interface; float32,
                float16, bfloat16, float64; contiguous and writable.

        Returns:
            ``grads`` itself, updated in place; with immutable arrays (JAX) the same containers with new arrays.

        Raises:
            GradientError, MismatchError, NonFiniteError: on every rank, naming rank and tensor; nothing was changed.
            RankTimeoutError: a rank did not come; the gradients are undefined and the session is closed.
        """
        self._require_usable()
        start = time.perf_counter()
        gradients, problem = self._adopt(grads)
        try:
            self._transport.waiter.what = f"sync number {self._step + 1}"
            batch, skip = self._agree(gradients, problem)
            for bucket in batch.buckets:
                self._run(bucket, gradients, skip)
        except (GradientError, MismatchError, NonFiniteError, PlanError, ConfigError):
            raise
        except BaseException as error:
            self._usable, self._why_not = False, f"it failed in {self._transport.waiter.what}: {error}"
            raise
        _wait_for_gpu(gradients)
        self._step += 1
        self._seconds += time.perf_counter() - start
        return buffers.rebuild(grads, gradients)

    def _adopt(self, grads: Any) -> tuple[list[Gradient], EspressoError | None]:
        """Flat arrays over the caller's memory; an error is kept until all ranks know of it."""
        gradients: list[Gradient] = []
        try:
            self._clock.timed(
                "check",
                lambda: gradients.extend(buffers.adopt(name, value) for name, value in buffers.flatten(grads)),
            )
            _refuse_shared_memory(gradients)
            _wait_for_gpu(gradients)
        except EspressoError as error:
            return gradients, error
        except Exception as error:  # a foreign array may raise anything; the other ranks must hear of it
            return gradients, GradientError(f"grads: cannot be read: {type(error).__name__}: {error}")
        return gradients, None

    def _agree(self, gradients: list[Gradient], problem: EspressoError | None) -> tuple[_Batch, frozenset[int]]:
        """Compare tensors, options and finiteness with the other ranks before any data moves."""
        batch, bad = None, {}
        if problem is None:
            try:
                batch = self._batch(tuple(g.spec for g in gradients))
                self._clock.timed("check", lambda: bad.update(self._non_finite(gradients, batch)))
            except EspressoError as error:
                problem = error
        digest = batch.digest if batch else b""
        notes: list[Any] = []
        self._clock.timed(
            "agree",
            lambda: notes.append(
                differences(self._transport, digest, bool(problem or bad), lambda: _document(problem, gradients, bad))
            ),
        )
        if notes[0] is None:
            assert batch is not None
            return batch, frozenset()
        return self._resolve(notes[0], batch)

    def _resolve(self, documents: list[Any], batch: _Batch | None) -> tuple[_Batch, frozenset[int]]:
        """Turn what the ranks said into one error on all of them, or into tensors to skip on all of them."""
        name = self._transport.describe
        _raise_problems(documents, name)
        _raise_mismatch(documents, name)
        if self._options.nonfinite == "raise":
            raise NonFiniteError(_non_finite_text(documents, name))
        assert batch is not None
        skip = {int(index) for document in documents for index in document["bad"]}
        for index in skip:
            self._skipped[batch.specs[index].name] += 1
        _LOG.warning("sync %d: skipped: %s", self._step + 1, _non_finite_text(documents, name))
        return batch, frozenset(skip)

    def _non_finite(self, gradients: list[Gradient], batch: _Batch) -> dict[str, int]:
        """Number of values, by tensor index, that are NaN or infinite (or would be in the float32 of a compressor)."""
        found = {}
        for bucket in batch.buckets:
            narrow = bucket.strategy.compressor != "none"
            for index, spec in zip(bucket.members, bucket.specs):
                count = reduction.count_non_finite(gradients[index].array, str(spec.dtype), narrow)
                if count:
                    found[str(index)] = count
        return found

    # --- one bucket ---------------------------------------------------------------------------------------------------

    def _run(self, bucket: _Bucket, gradients: list[Gradient], skip: frozenset[int]) -> None:
        arrays = [gradients[index].array for index in bucket.members]
        for index, array in zip(bucket.members, arrays):
            if index in skip:
                device.copy(array, device.zeros(array.size, array.dtype, device.device_of(array)))
        if skip.issuperset(bucket.members) or bucket.size == 0:
            return
        if bucket.strategy.compressor != "none":
            self._run_compressed(bucket, arrays[0])
        elif len(arrays) == 1:
            self._program(bucket, str(bucket.specs[0].dtype)).run(arrays[0], self._job(bucket), self._clock)
        else:
            self._run_fused(bucket, arrays)

    def _run_compressed(self, bucket: _Bucket, array: Any) -> None:
        """Compressors work on float32; other types are converted on the way in and out."""
        dtype = str(bucket.specs[0].dtype)
        x = array
        if dtype != "float32":
            x = self._transport.workspace.array("float32", array.size, np.float32, device.device_of(array))
            reduction.convert(x, array, dtype)
        self._program(bucket, "float32").run(x, self._job(bucket), self._clock)
        if x is not array:
            reduction.convert(array, x, dtype)

    def _run_fused(self, bucket: _Bucket, arrays: Sequence[Any]) -> None:
        fused = self._transport.workspace.array("fused", bucket.size, arrays[0].dtype, device.device_of(arrays[0]))
        edges = np.cumsum([0, *(array.size for array in arrays)])
        for array, start, stop in zip(arrays, edges, edges[1:]):
            device.copy(fused[start:stop], array)
        self._program(bucket, str(bucket.specs[0].dtype)).run(fused, self._job(bucket), self._clock)
        for array, start, stop in zip(arrays, edges, edges[1:]):
            device.copy(array, fused[start:stop])

    def _program(self, bucket: _Bucket, dtype: str) -> Program:
        strategy = bucket.strategy
        key = (strategy.compressor, str(strategy.route), bucket.size, dtype)
        if key not in self._programs:
            compressor = None if strategy.compressor == "none" else compressors.get(strategy.compressor)
            self._programs[key] = Program(
                self._transport, strategy.route, compressor, bucket.size, dtype, self._options.segment_bytes
            )
        return self._programs[key]

    def _job(self, bucket: _Bucket) -> Job:
        return Job(bucket.name, self._residuals if self._options.feedback else None, self._options.seed, self._step)

    # --- which tensor travels how -------------------------------------------------------------------------------------

    def _batch(self, specs: tuple[TensorSpec, ...]) -> _Batch:
        if specs not in self._batches:
            digest = fingerprint([dataclasses.astuple(spec) for spec in specs])
            self._batches[specs] = _Batch(specs, tuple(self._buckets(specs)), digest)
        return self._batches[specs]

    def _buckets(self, specs: Sequence[TensorSpec]) -> list[_Bucket]:
        """Every tensor by itself, but small dense ones of one type and place together."""
        buckets: list[_Bucket] = []
        small: dict[tuple[Any, ...], list[int]] = {}
        for index, spec in enumerate(specs):
            if spec.size == 0:
                continue
            strategy = self.strategy(spec)
            if strategy.compressor == "none" and spec.nbytes < self._options.min_bytes:
                small.setdefault((spec.dtype, spec.device, strategy), []).append(index)
            else:
                buckets.append(_Bucket((index,), strategy, (spec,)))
        for (_, _, strategy), members in small.items():
            buckets.append(_Bucket(tuple(members), strategy, tuple(specs[i] for i in members)))
        return buckets

    def strategy(self, spec: TensorSpec) -> Strategy:
        """How this session synchronises a tensor.

        Raises:
            PlanError: the plan does not know it; ConfigError: its route needs a GPU that the tensor is not on.
        """
        if self._options.plan is not None:
            chosen = self._options.plan.strategy(spec.name)
        else:
            chosen = self._options.strategy(spec, self._transport.topology)
        wants_gpu = any(getattr(step, "device", "cpu") == "gpu" for step in chosen.route.steps)
        if wants_gpu and spec.device == "cpu":
            raise ConfigError(
                f"{spec.name}: route {str(chosen.route)!r} encodes on the GPU, but the tensor is in host memory"
            )
        return chosen

    @property
    def topology(self) -> Topology:
        """Which ranks share a machine."""
        return self._transport.topology

    # --- opening, state, closing --------------------------------------------------------------------------------------

    def _agree_on_options(self, problem: str | None) -> None:
        described = self._options.described()
        notes = differences(
            self._transport,
            fingerprint(described),
            bool(problem),
            lambda: {"problem": problem, "options": described},
        )
        if notes is None:
            return
        self._transport.close()
        name = self._transport.describe
        said = [f"{name(rank)}: {note['problem']}" for rank, note in enumerate(notes) if note["problem"]]
        if said:
            raise ConfigError("; ".join(said))
        raise MismatchError(_options_text([note["options"] for note in notes], name))

    def stats(self) -> Stats:
        """Times, bytes and skipped steps so far, of this rank."""
        return Stats(self._step, self._seconds, dict(self._clock.seconds), self._transport.sent, dict(self._skipped))

    def state_dict(self) -> dict[str, Any]:
        """What training needs to go on exactly: step counter, seed and this rank's residuals (numpy copies)."""
        residuals = {}
        for key, value in self._residuals.items():
            residuals[key] = np.empty(value.size, np.float32)
            device.copy(residuals[key], value)
        return {**self._identity(), "step": self._step, "seed": self._options.seed, "residuals": residuals}

    def _identity(self) -> dict[str, Any]:
        machines = [list(ranks) for ranks in self._transport.topology.machines]
        return {"version": STATE_VERSION, "rank": self._transport.rank, "machines": machines}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()`` of the same rank of a job with the same ranks and machines.

        Raises:
            StateError: the state is of another version, rank or set of machines, or misses an entry.
        """
        for key, mine in self._identity().items():
            if state.get(key) != mine:
                raise StateError(
                    f"state: {key} is {state.get(key)!r}, this session has {mine!r}; load the state of the same job"
                )
        missing = {"step", "seed", "residuals"} - set(state)
        if missing:
            raise StateError(f"state: {', '.join(sorted(missing))} missing; pass what state_dict() returned")
        self._step = int(state["step"])
        self._options = dataclasses.replace(self._options, seed=int(state["seed"]))
        self._residuals = {key: np.array(value, np.float32) for key, value in state["residuals"].items()}

    def close(self) -> None:
        """Free communicator and shared memory; every rank must call it. A session that failed is only dropped.

        Raises:
            RankTimeoutError: a rank did not come.
        """
        if self._usable:
            self._usable, self._why_not = False, "it was closed"
            self._transport.waiter.what = "Session.close"
            self._transport.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is None:
            self.close()
        else:  # the other ranks may never come to a collective close
            self._usable, self._why_not = False, "it was left by an exception"

    def _require_usable(self) -> None:
        if not self._usable:
            raise EspressoError(f"this session cannot be used any more: {self._why_not}; open a new one")


def _limit_threads(local_ranks: int) -> None:
    """Share the machine's cores among its ranks."""
    from .compressors import _cpu

    _cpu.limit_threads(max(1, available_cores() // local_ranks))


def _refuse_shared_memory(gradients: Sequence[Gradient]) -> None:
    """Memory under two names would be averaged, and its residual added, twice."""
    spans = sorted(
        (device.address(g.array), g.spec.nbytes, g.spec.name) for g in gradients if g.array.size and g.rebuild is None
    )
    for (start, nbytes, first), (following, _, second) in itertools.pairwise(spans):
        if following < start + nbytes:
            raise GradientError(f"{first} and {second} share memory; pass it once, or pass copies")


def _wait_for_gpu(gradients: Sequence[Gradient]) -> None:
    """Between the caller's streams and ours: whoever wrote, or will read, on any stream finds finished data."""
    if any(device.device_of(gradient.array) == "gpu" for gradient in gradients):
        device.synchronize()


# --- texts for disagreements: made from the same documents on every rank, so they are the same everywhere -------------


def _document(problem: EspressoError | None, gradients: Sequence[Gradient], bad: Mapping[str, int]) -> dict[str, Any]:
    return {
        "problem": None if problem is None else [type(problem).__name__, str(problem)],
        "tensors": [[g.spec.name, str(g.spec), g.spec.device] for g in gradients],
        "bad": dict(bad),
    }


def _raise_problems(documents: Sequence[Any], name: Any) -> None:
    said = [(rank, *document["problem"]) for rank, document in enumerate(documents) if document["problem"]]
    if said:
        kinds = {cls.__name__: cls for cls in (GradientError, PlanError, ConfigError)}
        raise kinds.get(said[0][1], GradientError)("; ".join(f"{name(rank)}: {text}" for rank, _, text in said))


def _raise_mismatch(documents: Sequence[Any], name: Any) -> None:
    first = documents[0]["tensors"]
    for rank, document in enumerate(documents):
        mine = document["tensors"]
        if mine == first:
            continue
        for position, (a, b) in enumerate(zip(first, mine)):
            if a != b:
                raise MismatchError(
                    f"ranks disagree about tensor number {position + 1}: {name(0)} has {a[0]!r} {a[1]} on {a[2]}, "
                    f"{name(rank)} has {b[0]!r} {b[1]} on {b[2]}; pass the same tensors in the same order on every rank"
                )
        longer, who = (first, name(0)) if len(first) > len(mine) else (mine, name(rank))
        extra = longer[min(len(first), len(mine))][0]
        raise MismatchError(
            f"ranks disagree about the tensors: {name(0)} has {len(first)}, {name(rank)} has {len(mine)}; "
            f"{extra!r} is only on {who}; pass the same tensors on every rank (None where a rank has no gradient is "
            f"allowed only if all have none)"
        )


def _non_finite_text(documents: Sequence[Any], name: Any) -> str:
    parts = [
        f"{name(rank)}: {document['tensors'][int(index)][0]!r} has {count} NaN or infinite value(s)"
        for rank, document in enumerate(documents)
        for index, count in document["bad"].items()
    ]
    return "; ".join(parts) + "; lower the loss scale or the learning rate, or pass nonfinite='skip'"


def _options_text(options: Sequence[Mapping[str, Any]], name: Any) -> str:
    for rank, mine in enumerate(options):
        for key, value in mine.items():
            if value != options[0][key]:
                first = options[0][key]
                return f"ranks disagree about {key}: {name(0)} has {first!r}, {name(rank)} has {value!r}; pass the same"
    return "ranks disagree about the options; pass the same"
