"""The session: a communicator, a strategy for every tensor, the residuals, and ``sync``."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import struct
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from . import buffers, compressors, device
from .buffers import Gradient
from .collectives import reduction
from .collectives.agreement import differences, fingerprint
from .collectives.executor import OWN, Clock, Job, Program
from .collectives.layout import Topology
from .collectives.schedule import check_route
from .collectives.transport import MESSAGE_BYTES, Transport
from .compressors import Compressor
from .errors import (
    ConfigError,
    EspressoError,
    GradientError,
    MismatchError,
    NonFiniteError,
    PlanError,
    StateError,
)
from .feedback import NO_FEEDBACK, Feedback
from .launch import threads_per_rank
from .options import DEFAULT_SEGMENT, DEFAULT_TIMEOUT, Options
from .types import Plan, Route, Strategy, TensorSpec

STATE_VERSION = 2
_LOG = logging.getLogger("espresso_mpi")


@dataclass(frozen=True)
class Stats:
    """What a session did so far, on this rank.

    ``seconds`` is the time inside ``sync``; ``seconds_by`` splits it: check (adopting arrays, looking for NaN), agree,
    encode, wire (collectives with their sums and waits), decode. ``bytes_by_level`` counts bytes sent to other ranks
    inside the machine and between machines; ``skipped`` the steps that a tensor sat out because it was not finite;
    ``saturated`` counts integers of summed payloads (thc) that reached the end of their range on this rank.
    """

    steps: int
    seconds: float
    seconds_by: Mapping[str, float]
    bytes_by_level: Mapping[str, int]
    skipped: Mapping[str, int]
    saturated: int = 0

    @property
    def wire_bytes(self) -> int:
        """Bytes sent to other ranks, on all levels."""
        return sum(self.bytes_by_level.values())


@dataclass(frozen=True)
class _Bucket:
    """Tensors that travel together: one, or several small dense ones of the same type side by side.

    ``compressor`` is that of the strategy, made for the tensor's shape; its schedules are not settled yet.
    """

    members: tuple[int, ...]
    strategy: Strategy
    specs: tuple[TensorSpec, ...]
    compressor: Compressor | None = None
    feedback: Feedback = NO_FEEDBACK

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
        feedback: what becomes of what compression loses, a ``Feedback`` or its spelling: ``"auto"`` (add it in the next
            step, where the compressor allows it), ``"plain"``, ``"plain:decay=0.9"``, ``"ef21"``,
            ``"ef21:momentum=0.1"`` or ``"none"``.
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
        feedback: Feedback | str | bool = "auto",
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
        note = {"problem": problem, "options": options.described()}
        self._transport = Transport.open(comm, options.transport(), _agree_on_options, note)
        self._usable, self._why_not = True, ""
        self._step = 0
        self._memory: dict[str, Any] = {}
        self._batches: dict[tuple[TensorSpec, ...], _Batch] = {}
        self._programs: dict[tuple[Any, ...], tuple[Compressor | None, Program]] = {}
        self._clock = Clock()
        self._clock.seconds.update(check=0.0, agree=0.0)
        self._skipped: Counter[str] = Counter()
        self._warned = False
        self._seconds = 0.0
        _limit_threads(len(self._transport.machine))

    # --- synchronising ------------------------------------------------------------------------------------------------

    def sync(self, grads: Any) -> Any:
        """Replace every array by its mean over the ranks.

        Args:
            grads: one array, or lists, tuples and dicts of them, nested as you like; None entries are allowed where all
                ranks have them. numpy, CuPy, torch, or anything with DLPack or the CUDA array interface; float32,
                float16, bfloat16, float64; contiguous and writable. A tensor's residual is found by its name, the keys
                on the way to it, so one name must stand for one tensor in every call.

        Returns:
            ``grads`` itself, updated in place; with immutable arrays (JAX) the same containers with new arrays.

        Raises:
            GradientError, MismatchError, NonFiniteError: on every rank, naming rank and tensor; nothing was changed.
            RankTimeoutError: a rank did not come; the gradients are undefined and the session is closed.
        """
        self._require_usable()
        start = time.perf_counter()
        self._transport.waiter.what = f"sync number {self._step + 1}"
        try:
            gradients, problem = self._adopt(grads)
            batch, skip = self._agree(gradients, problem)
        except (GradientError, MismatchError, NonFiniteError, PlanError, ConfigError):
            raise  # on all ranks, before any data moved: the session can go on
        except BaseException as error:
            self._give_up(error)
            raise
        try:
            for bucket in batch.buckets:
                self._run(bucket, gradients, skip)
        except BaseException as error:
            self._give_up(error)
            raise
        _wait_for_gpu(gradients)
        if self._clock.saturated and not self._warned:
            self._warned = True
            _LOG.warning("sync %d: summed integers left their range and were cut; use fewer levels", self._step + 1)
        self._step += 1
        self._seconds += time.perf_counter() - start
        return buffers.rebuild(grads, gradients)

    def _give_up(self, error: BaseException) -> None:
        """Ranks may be out of step from here on."""
        self._usable, self._why_not = False, f"it failed in {self._transport.waiter.what}: {error!r}"

    def _adopt(self, grads: Any) -> tuple[list[Gradient], EspressoError | None]:
        """Flat arrays over the caller's memory; an error is kept until all ranks know of it."""
        gradients: list[Gradient] = []
        try:
            with self._clock.timing("check"):
                gradients += [buffers.adopt(name, value) for name, value in buffers.flatten(grads)]
                _refuse_shared_memory(gradients)
                _wait_for_gpu(gradients)
        except EspressoError as error:
            return gradients, error
        except Exception as error:  # a foreign array may raise anything; the other ranks must hear of it
            return gradients, GradientError(f"grads: cannot be read: {type(error).__name__}: {error}")
        return gradients, None

    def _agree(self, gradients: list[Gradient], problem: EspressoError | None) -> tuple[_Batch, frozenset[int]]:
        """Compare tensors, options and finiteness with the other ranks before any data moves."""
        batch: _Batch | None = None
        bad: dict[str, int] = {}
        if problem is None:
            try:
                batch = self._batch(tuple(g.spec for g in gradients))
                with self._clock.timing("check"):
                    bad = self._non_finite(gradients, batch)
            except EspressoError as error:
                problem = error
            except Exception as error:  # a compressor of the user's own may raise anything; the others must hear of it
                problem = ConfigError(f"{type(error).__name__}: {error}")
        digest = self._digest(batch)
        with self._clock.timing("agree"):
            documents = differences(
                self._transport, digest, bool(problem or bad), lambda: self._document(problem, gradients, bad)
            )
        if documents is None:
            assert batch is not None
            return batch, frozenset()
        return self._resolve(documents, batch)

    def _digest(self, batch: _Batch | None) -> bytes:
        """What must be equal on all ranks at this step: the tensors, and where training stands."""
        place = struct.pack("<qq", self._step, self._options.seed)
        return hashlib.sha256((batch.digest if batch else b"") + place).digest()

    def _document(
        self, problem: EspressoError | None, gradients: Sequence[Gradient], bad: Mapping[str, int]
    ) -> dict[str, Any]:
        """What this rank tells the others where the digests differ."""
        return {
            "problem": None if problem is None else [type(problem).__name__, str(problem)],
            "place": [self._step, self._options.seed],
            "tensors": [[g.spec.name, str(g.spec), g.spec.device] for g in gradients],
            "bad": dict(bad),
        }

    def _resolve(self, documents: list[Any], batch: _Batch | None) -> tuple[_Batch, frozenset[int]]:
        """Turn what the ranks said into one error on all of them, or into tensors to skip on all of them."""
        name = self._transport.describe
        _raise_problems(documents, name)
        _raise_mismatch(documents, name)
        if self._options.nonfinite == "raise":
            cure = "; lower the loss scale or the learning rate, or pass nonfinite='skip'"
            raise NonFiniteError(_non_finite_text(documents, name) + cure)
        assert batch is not None
        skip = {int(index) for document in documents for index in document["bad"]}
        for index in skip:
            self._skipped[batch.specs[index].name] += 1
        if self._transport.rank == 0:
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
        compressor = bucket.compressor and bucket.compressor.at(self._step)
        key = (bucket.compressor, strategy.route, bucket.size, dtype)
        settled, program = self._programs.get(key, (None, None))
        if program is None or settled != compressor:
            final = None if bucket.compressor is None else bucket.compressor.at(None).nbytes(bucket.size)
            program = Program(
                self._transport, strategy.route, compressor, bucket.size, dtype, self._options.segment_bytes, final
            )
            self._programs[key] = compressor, program  # only that of the present stage of a schedule
        return program

    def _job(self, bucket: _Bucket) -> Job:
        return Job(bucket.name, self._memory, bucket.feedback, self._options.seed, self._step)

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
            elif strategy.compressor == "none":
                buckets.append(_Bucket((index,), strategy, (spec,)))
            else:
                compressor = compressors.get(strategy.compressor).shaped(spec.shape)
                feedback = self._options.feedback.resolved(compressor, spec.size)
                buckets.append(_Bucket((index,), strategy, (spec,), compressor, feedback))
        for (_, _, strategy), members in small.items():
            buckets.append(_Bucket(tuple(members), strategy, tuple(specs[i] for i in members)))
        return buckets

    def strategy(self, spec: TensorSpec) -> Strategy:
        """How this session synchronises a tensor.

        Raises:
            PlanError: the plan does not know it; ConfigError: its route needs a GPU that the tensor is not on, or sums
                payloads that cannot be summed.
        """
        if self._options.plan is not None:
            chosen = self._options.plan.strategy(spec.name)
        else:
            chosen = self._options.strategy(spec, self._transport.topology)
        compressor = None if chosen.compressor == "none" else compressors.get(chosen.compressor)
        check_route(chosen.route, self._transport.topology, compressor)
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

    def stats(self) -> Stats:
        """Times, bytes and skipped steps so far, of this rank."""
        clock = self._clock
        return Stats(
            self._step, self._seconds, dict(clock.seconds), self._transport.sent, dict(self._skipped), clock.saturated
        )

    def state_dict(self) -> dict[str, Any]:
        """What training needs to go on exactly: step counter, seed, and what is kept on this rank (numpy copies).

        ``memory`` holds residuals and what methods keep of their own, by
        ``tensor|elements|encode point|region|what``.
        """
        memory = {}
        for key, value in self._memory.items():
            memory[key] = np.empty(value.size, np.float32)
            device.copy(memory[key], value)
        place = {"step": self._step, "seed": self._options.seed}
        return {**self._identity(), **place, "memory": memory, "checksum": _checksum(memory)}

    def _identity(self) -> dict[str, Any]:
        machines = [list(ranks) for ranks in self._transport.topology.machines]
        described = self._options.described()
        options = {
            key: described[key] for key in ("compressor", "route", "plan", "min_bytes", "segment_bytes", "feedback")
        }
        return {"version": STATE_VERSION, "rank": self._transport.rank, "machines": machines, "options": options}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()`` of the same rank of a job with the same ranks, machines, compressor and route.

        Collective: every rank loads its own.

        Raises:
            StateError: on every rank, if any rank's state is of another version, rank, set of machines or strategy,
                or is damaged; MismatchError: the states are of different steps.
        """
        self._require_usable()
        self._transport.waiter.what = "load_state_dict"
        problem, step, seed = None, 0, 0
        memory: dict[str, Any] = {}
        try:
            step, seed, memory = self._read_state(state)
        except StateError as error:
            problem = [type(error).__name__, str(error)]
        except Exception as error:  # whatever was passed for a state; the other ranks must hear of it
            problem = ["StateError", f"state: cannot be read: {type(error).__name__}: {error}"]
        try:
            documents = differences(
                self._transport,
                fingerprint([step, seed]),
                problem is not None,
                lambda: {"problem": problem, "place": [step, seed], "tensors": [], "bad": {}},
            )
        except BaseException as error:
            self._give_up(error)
            raise
        if documents is not None:
            _raise_problems(documents, self._transport.describe)
            _raise_mismatch(documents, self._transport.describe)
        self._step, self._memory = step, memory
        self._options = dataclasses.replace(self._options, seed=seed)

    def _read_state(self, state: Any) -> tuple[int, int, dict[str, Any]]:
        """(step, seed, memory) of a state that fits this session."""
        if not isinstance(state, Mapping):
            raise StateError(f"state: got {type(state).__name__}; expected what state_dict() returned")
        for key, mine in self._identity().items():
            if state.get(key) != mine:
                raise StateError(
                    f"state: {key} is {state.get(key)!r}, this session has {mine!r}; load the state of the same job"
                )
        step, seed, memory = state.get("step"), state.get("seed"), state.get("memory")
        if not _in_64_bits(step) or step < 0 or not _in_64_bits(seed) or not isinstance(memory, Mapping):
            raise StateError("state: step, seed or memory are missing or damaged; pass what state_dict() returned")
        checked = {key: _checked_memory(key, value) for key, value in memory.items()}
        if _checksum(checked) != state.get("checksum"):
            raise StateError("state: the memory is not what was saved: something in it is missing, added or damaged")
        return step, seed, checked

    @property
    def usable(self) -> bool:
        """Whether ``sync`` may be called: not closed, and no failure that leaves ranks out of step."""
        return self._usable

    def __repr__(self) -> str:
        o = self._options
        how = "a plan" if o.plan else f"compressor {o.compressor!r}, route {str(o.route) if o.route else 'by topology'}"
        return f"<Session of {self.topology}: {how}; step {self._step}{'' if self._usable else '; not usable'}>"

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


def _in_64_bits(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63 - 1


def _checksum(memory: Mapping[str, np.ndarray]) -> int:
    """Of names and values: what one rank has lost would make its replica another one, silently."""
    total = 0
    for key in sorted(memory):
        total = zlib.crc32(memory[key].tobytes(), zlib.crc32(key.encode(), total))
    return total


def _checked_memory(key: str, value: Any) -> np.ndarray:
    """A copy of what was kept, if it fits its key."""
    if not isinstance(key, str):
        raise StateError(f"state: memory has the key {key!r}; expected text; the state is damaged")
    *_, region, what = key.rsplit("|", 4) if key.count("|") >= 4 else ("", "")
    start, _, stop = region.partition(":")
    kept = np.array(value, np.float32)
    ours = not what.startswith(OWN)  # residuals and means are as large as their region, methods' own arrays are not
    sized = start.isdigit() and stop.isdigit() and (not ours or kept.size == int(stop) - int(start))
    if not sized or kept.ndim != 1 or not np.isfinite(kept).all():
        raise StateError(f"state: {key!r} has shape {kept.shape}, or is not finite; the state is damaged")
    return kept


def _limit_threads(local_ranks: int) -> None:
    """Share the machine's cores among its ranks."""
    from .compressors import _cpu

    _cpu.limit_threads(threads_per_rank(local_ranks))


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


def _raise_problems(documents: Sequence[Any], name: Any) -> None:
    said = [(rank, document["problem"]) for rank, document in enumerate(documents) if document["problem"]]
    if said:
        kinds = {cls.__name__: cls for cls in (GradientError, PlanError, ConfigError, StateError)}
        kind, _ = said[0][1]
        raise kinds[kind](_grouped([(rank, text) for rank, (_, text) in said], len(documents), name))


def _grouped(said: Sequence[tuple[int, str]], size: int, name: Any) -> str:
    """One clause for each different text, with the ranks that say it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in said:
        ranks.setdefault(text, []).append(rank)
    return "; ".join(
        f"{'all ranks' if len(who) == size > 1 else ', '.join(map(name, who))}: {text}" for text, who in ranks.items()
    )


def _raise_mismatch(documents: Sequence[Any], name: Any) -> None:
    first, place = documents[0]["tensors"], documents[0]["place"]
    for rank, document in enumerate(documents):
        if document["place"] != place:
            raise MismatchError(
                f"ranks are at different places: {name(0)} at step {place[0]} with seed {place[1]}, {name(rank)} at "
                f"step {document['place'][0]} with seed {document['place'][1]}; load the states of one checkpoint"
            )
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
    return "; ".join(parts)


def _agree_on_options(notes: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Given (host, note) of every rank: raise what is wrong with any rank's options, or how they differ."""

    def name(rank: int) -> str:
        return f"rank {rank} ({notes[rank][0]})"

    said = [(rank, note["problem"]) for rank, (_, note) in enumerate(notes) if note["problem"]]
    if said:
        raise ConfigError(_grouped(said, len(notes), name))
    options = [note["options"] for _, note in notes]
    if any(mine != options[0] for mine in options):
        raise MismatchError(_options_text(options, name))


def _options_text(options: Sequence[Mapping[str, Any]], name: Any) -> str:
    for rank, mine in enumerate(options):
        for key, value in mine.items():
            if value != options[0][key]:
                first = options[0][key]
                return f"ranks disagree about {key}: {name(0)} has {first!r}, {name(rank)} has {value!r}; pass the same"
    return "ranks disagree about the options; pass the same"
