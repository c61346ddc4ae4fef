"""Dense collectives whose data are piggybacked on the header of the round: one compiled call does it all.

A collective is remembered when it runs for the first time, by its number, on all ranks at once. When it comes again as
the only call of its rank, its header and its data are shown together. If a rank deviates, nothing was copied or summed,
and the round is an ordinary one. Between nodes that holds for short sums; all other collectives begin with an agreement
of one compiled call there, and their data travel after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..arrays import device
from ..collectives.data.reduction import arithmetic
from ..collectives.messages import agreed_copies
from ..collectives.messages.agreed import Agreed, AgreedCopies, AgreedReductions, How, Parts
from ..collectives.messages.agreed_nodes import NodeAgreement, NodeSums
from ..collectives.messages.mpi_reduction import operator_of
from ..collectives.messages.part_sizes import size_error
from ..collectives.messages.sum_calls import NO_CHECK, AgreedSums
from ..collectives.messages.transport import Transport
from ..collectives.messages.window import SharedWindow
from ..collectives.progress import Progress
from ..errors import EspressoError
from ..tracing.ledger import Ledger, LedgerInterval
from ..tracing.recording import Recorder
from . import fast_path, piggyback_limit
from .batches import Bucket

_NOT_YET, _NO_PARTS = Agreed(0.0), Parts((), (), (), (), shared=True)
_CHECK = LedgerInterval("check", "", agreed_copies.SEARCHED, agreed_copies.ASKED)
_AGREE = LedgerInterval("agree", "", agreed_copies.ASKED, agreed_copies.ANSWERED, share=(0.0, 1.0))


class PiggybackData(Protocol):
    """What travels in one call, as this rank sees it.

    Attributes:
        rest: what is done after the compiled call, because it has moved no data; None: nothing.
    """

    @property
    def rest(self) -> Callable[[Transport], Progress] | None:
        """See above."""

    def prepared(self, transport: Transport, window: SharedWindow, recorder: Recorder) -> PreparedCall:
        """What runs such calls."""

    def begin(self, agreed: Any, header: np.ndarray, ignored: int) -> bool:
        """Show a header; if all are equal, move the data. ``agreed``: as ``prepared`` has made it; as its ``begin``."""


class CompiledCall(Protocol):
    """Shows a header, and does what is to be done if those of all ranks are equal; see ``agreed.AgreedCall``."""

    marks: np.ndarray
    place: int
    saturated: int

    def finish(self) -> Agreed:
        """See ``AgreedCall``."""

    def done(self) -> Agreed:
        """See ``AgreedCall``."""


class PreparedCall:
    """What runs a collective again and again.

    Args:
        agreed: the compiled call; wire: the intervals to report beside the agreement.
        rest: makes what is to be done after it of a call's data; None: nothing.

    Attributes:
        agreed, rest: as given.
    """

    def __init__(
        self,
        agreed: CompiledCall,
        recorder: Recorder,
        *wire: LedgerInterval,
        rest: Callable[[Summing], Progress] | None = None,
    ) -> None:
        self.agreed, self._tensors, self.rest = agreed, sum(1 for one in wire if one.tensor), rest
        self._ledger = ledger = Ledger(recorder, [_AGREE, *wire], agreed_copies.MARKS)
        agreed.marks, agreed.place = ledger.row, ledger.place

    def record(self, step: int) -> None:
        """Report the times of a run that has ended."""
        agreed, ledger = self.agreed, self._ledger
        ledger.note((step,) * self._tensors)
        agreed.marks, agreed.place = ledger.row, ledger.place


class Copying:
    """A broadcast, an allgather, a gather or an alltoall.

    Args:
        source, target: arrays that are contiguous on the host; None: there is none.
        parts: what goes where, in bytes.
        places: where they begin, if this is known.
    """

    rest = None

    def __init__(self, source: Any, target: Any, parts: Parts, places: tuple[int, int] | None = None) -> None:
        self.given, self.result, self.parts = source, target, parts
        self.source, self.target = places or (_place_of(source), _place_of(target))

    def prepared(self, transport: Transport, window: SharedWindow, recorder: Recorder) -> PreparedCall:
        """See ``PiggybackData``."""
        return PreparedCall(AgreedCopies(window, transport.waiter, transport.single_copy, self.parts), recorder)

    def begin(self, agreed: AgreedCopies, header: np.ndarray, ignored: int) -> bool:
        """See ``PiggybackData``."""
        return agreed.begin(header, ignored, self.source, self.target, self.parts)


class Scattering:
    """A reduce-scatter of floating-point numbers.

    Args:
        x: flat; own: receives this rank's region of the sum.
        how: from ``reduction.arithmetic``.
        edges: int64: where each rank's region begins and ends.
    """

    rest = None

    def __init__(self, x: np.ndarray, own: np.ndarray, how: How, edges: np.ndarray) -> None:
        self.x, self.own, self.edges, self._how = x, own, edges, how

    @property
    def over(self) -> Callable[[np.ndarray, np.ndarray], Scattering]:
        """Makes the same of other arrays."""
        how, edges = self._how, self.edges
        return lambda x, own: Scattering(x, own, how, edges)

    def prepared(self, transport: Transport, window: SharedWindow, recorder: Recorder) -> PreparedCall:
        """See ``PiggybackData``."""
        return PreparedCall(AgreedSums(window, transport.waiter, self.x.dtype, self._how), recorder)

    def begin(self, agreed: AgreedSums, header: np.ndarray, ignored: int) -> bool:
        """See ``PiggybackData``."""
        return agreed.scatter(header, ignored, self.x, self.own, self.edges)


class Combining:
    """A short reduction of numbers of any kind by one of MPI's operators.

    Args:
        x: flat, not empty; replaced. op: the operator.
        parts: of an allgather of x.
    """

    rest = None

    def __init__(self, x: np.ndarray, op: str, parts: Parts) -> None:
        self.x, self._op, self._parts = x, op, parts
        self._rows = np.empty((len(parts.gives), x.size), x.dtype)

    @property
    def over(self) -> Callable[[np.ndarray], Combining]:
        """Makes the same of another array."""
        op, parts = self._op, self._parts
        return lambda x: Combining(x, op, parts)

    def prepared(self, transport: Transport, window: SharedWindow, recorder: Recorder) -> PreparedCall:
        """See ``PiggybackData``."""
        combine = operator_of(transport, self._op).combine
        assert combine is not None
        agreed = AgreedReductions(window, transport.waiter, transport.single_copy, self._parts, combine)
        return PreparedCall(agreed, recorder)

    def begin(self, agreed: AgreedReductions, header: np.ndarray, ignored: int) -> bool:
        """See ``PiggybackData``."""
        return agreed.reduce(header, ignored, self.x, self._rows, self._parts)


class Summing:
    """An allreduce or a reduce of floating-point numbers.

    Args:
        x: flat; reads: whether this rank wants the result.

    Attributes:
        check: of the values, where the sum itself makes it.
    """

    rest, check = None, NO_CHECK

    def __init__(self, x: np.ndarray, reads: bool) -> None:
        self.x, self.reads = x, reads

    def begin(self, agreed: AgreedSums | NodeSums | NodeAgreement, header: np.ndarray, ignored: int) -> bool:
        """See ``PiggybackData``."""
        if isinstance(agreed, AgreedSums | NodeSums):
            return agreed.reduce(header, ignored, self.x, self.reads, self.check)
        return agreed.agree(header, ignored)


def is_unsearched(moves: Any) -> bool:
    """Whether only the sum looks for values that must not be summed."""
    return isinstance(moves, Summing) and moves.check.pending


class Agreeing:
    """For a call whose ranks only agree.

    Args:
        rest: what is done once they have agreed; None: nothing.
        early, sizes: as of ``Exchange``.
    """

    def __init__(
        self, rest: Callable[[Transport], Progress] | None = None, early: bool = False, sizes: np.ndarray | None = None
    ) -> None:
        self.rest, self.early, self._sizes = rest, early, sizes

    def prepared(self, transport: Transport, window: SharedWindow, recorder: Recorder) -> PreparedCall:
        """See ``PiggybackData``."""
        return PreparedCall(AgreedCopies(window, transport.waiter, transport.single_copy, _NO_PARTS), recorder)

    def begin(self, agreed: AgreedCopies | NodeAgreement, header: np.ndarray, ignored: int) -> bool:
        """See ``PiggybackData``."""
        if isinstance(agreed, NodeAgreement):
            return agreed.agree(header, ignored, self._sizes)
        return agreed.agree(header, ignored)


class DensePiggyback:
    """The data of the only call of this rank.

    Args:
        transport: what it uses.
        prepared: what runs the call; moves: its data.
        begun: whether it is done, if it was begun before; None: it was not.

    Attributes:
        prepared: what runs the call.
        met: when this rank saw that all bring the same call; then it is done. 0: it has not.
        agreed: what came of it.
    """

    def __init__(self, transport: Transport, prepared: PreparedCall, moves: Any, begun: bool | None = None) -> None:
        self._transport, self.prepared, self._moves, self._begun = transport, prepared, moves, begun
        self.met, self.agreed = 0.0, _NOT_YET
        self._work: Progress | None = None
        if begun and isinstance(moves, Agreeing) and moves.early and prepared.agreed.done().unequal is None:
            self._start()

    def _start(self) -> None:
        """Send what can be sent, before any bookkeeping: where ranks share cores, a link is idle meanwhile."""
        self._work = self._moves.rest(self._transport)
        try:
            next(self._work, None)
        except BaseException:
            self._transport.outlive([self._moves, self._work])
            raise

    def exchange(self, header: np.ndarray, ignored: int) -> Sequence[np.ndarray]:
        """As of ``fast_path.Piggyback``."""
        agreed = self.prepared.agreed
        try:
            done = self._moves.begin(agreed, header, ignored) if self._begun is None else self._begun
            self.agreed = agreed.done() if done else agreed.finish()
        except BaseException:
            self._transport.outlive(self._moves)  # another rank may still write there
            raise
        self.met = self.agreed.met
        return self.agreed.headers

    @property
    def odd(self) -> bool:
        """Whether there are values that must not be summed: the arrays are as before."""
        return self.agreed.odd

    @property
    def unsearched(self) -> bool:
        """Whether only the sum looks for such values."""
        return is_unsearched(self._moves)

    def rest(self, transport: Transport) -> Progress:
        """What is to be done now that all ranks have met."""
        if self.agreed.unequal is not None:
            return
        if self._work is not None:
            work = self._work
        elif self.prepared.rest is not None:
            work = self.prepared.rest(self._moves)
        elif self._moves.rest is not None:
            work = self._moves.rest(transport)
        else:
            return
        try:
            yield from work
        except BaseException:
            transport.outlive([self._moves, work])  # messages under way may still be written to the arrays
            raise

    def undo(self) -> None:
        """The headers differ: nothing has changed."""

    def record(self, step: int) -> None:
        """Report the times of the run, which has ended."""
        self.prepared.record(step)

    def problem(self, title: str) -> EspressoError | None:
        """What is wrong with the call, the same on all ranks; None: it is done."""
        found = self.agreed.unequal
        if found is not None and not isinstance(self.prepared.agreed, NodeAgreement):
            found = self._transport.node[found[0]], self._transport.node[found[1]]
        return None if found is None else size_error(title, self._transport, found)


class DensePiggybacks:
    """The dense collectives that are remembered.

    Attributes:
        known: what runs them, by number.
        moves_data: whether compiled calls move the data of all collectives; otherwise only those of short sums.
    """

    def __init__(self, transport: Transport, window: SharedWindow | None, recorder: Recorder) -> None:
        self._transport, self._window, self._recorder = transport, window, recorder
        self.known: dict[int, PreparedCall] = {}
        self.moves_data = window is not None

    def remember(self, number: int | None, moves: PiggybackData | None, sizes: np.ndarray | None = None) -> None:
        """A collective begins on the ordinary path, and may be piggybacked later. ``sizes``: as of ``Exchange``."""
        transport, window = self._transport, self._window
        if window is None and sizes is not None and sizes.size > self._room(0):
            return
        if number is None or moves is None or transport.topology.size == 1 or number in self.known:
            return
        if window is not None:
            self.known[number] = moves.prepared(transport, window, self._recorder)
        else:
            self.known[number] = PreparedCall(NodeAgreement(transport, self._room), self._recorder)

    def _room(self, header_size: int) -> int:
        """As ``fast_path.room`` on several nodes."""
        return fast_path.start_of(header_size) + piggyback_limit.room(self._transport)

    def data_of(self, moves: PiggybackData, sizes: np.ndarray | None) -> PiggybackData:
        """What is piggybacked of a call; arguments: as of ``Exchange``."""
        return moves if self.moves_data else NOTHING if sizes is None else Agreeing(sizes=sizes)

    def of(self, number: int | None) -> PreparedCall | None:
        """What runs a collective."""
        return None if number is None else self.known.get(number)

    def sums(self, number: int, bucket: Bucket, x: np.ndarray, header_size: int) -> PreparedCall:
        """What sums the one array of a call; ``header_size``: bytes of the headers by now."""
        found = self.known.get(number)
        if found is None or (isinstance(found.agreed, NodeSums) and not found.agreed.takes(header_size)):
            made = self._on_nodes(bucket, x, header_size) if self._window is None else self._on_node(bucket, x)
            found = self.known[number] = made
        return found

    def routed(self, number: int, run: Callable[[np.ndarray], Progress]) -> PreparedCall:
        """What sums the one array of a call by its route, once all ranks have agreed; ``run``: does so."""
        found = self.known.get(number)
        if found is None:
            agreed = NodeAgreement(self._transport, self._room)
            found = self.known[number] = PreparedCall(agreed, self._recorder, rest=lambda moves: run(moves.x))
        return found

    def _on_node(self, bucket: Bucket, x: np.ndarray) -> PreparedCall:
        assert self._window is not None
        how = arithmetic(1.0 if bucket.total else float(self._transport.topology.size), bucket.dtype)
        agreed = AgreedSums(self._window, self._transport.waiter, x.dtype, how)
        return PreparedCall(agreed, self._recorder, _CHECK, _wire(bucket, "flat", agreed.sent(x), 0))

    def _on_nodes(self, bucket: Bucket, x: np.ndarray, header_size: int) -> PreparedCall:
        transport = self._transport
        topology = transport.topology.undivided if bucket.total else transport.topology
        stages, start = fast_path.stages_of(bucket.strategy.route, topology), fast_path.start_of(header_size)
        sums = NodeSums(transport, self._room, stages, x.size, bucket.dtype, x.dtype, start)
        return PreparedCall(sums, self._recorder, _CHECK, _wire(bucket, "flat", *sums.sent))

    def forget(self) -> None:
        """The numbers of calls have become invalid."""
        self.known.clear()


def _wire(bucket: Bucket, level: str, intra: int, inter: int) -> LedgerInterval:
    """What is recorded of a sum beside the agreement."""
    first, last = agreed_copies.ANSWERED, agreed_copies.ENDED
    return LedgerInterval("wire", bucket.name, first, last, "fast path", level, intra, inter)


def _place_of(array: Any) -> int:
    """The address of an array on the host; 0 if it is empty."""
    return device.begin_of(array) if array is not None and array.size else 0


NOTHING = Agreeing()
"""For a call whose ranks only agree."""
