"""The laws can fail: a small correct method obeys them all, and each way of breaking it breaks the law named for it."""

from __future__ import annotations

from dataclasses import dataclass

import law_tools
import laws
import numba
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from espresso_mpi.compressors import Compressor, Context, Summary, register, unregister
from espresso_mpi.compressors.checks import check_positive_int
from espresso_mpi.compressors.kernels.cpu import host


@dataclass(frozen=True)
class Every(Compressor):
    """Sends every ``stride``-th element exactly. Payload: ceil(n/stride) float32 values."""

    stride: int = 2
    name = "every"
    sparse = True
    examples = ("every:stride=3",)

    def __post_init__(self):
        check_positive_int(self.name, "stride", self.stride)

    def nbytes(self, n):
        return 4 * -(-n // self.stride)

    def _encode_cpu(self, x, payload, residual, context):
        v = self._sum(x, residual, context)
        payload.view(np.float32)[...] = v[:: self.stride]
        v[:: self.stride] = 0

    def _decode_cpu(self, payload, out, add, context):
        if not add:
            out.fill(0)
        out[:: self.stride] += self._sanitised(payload.view(np.float32), context)

    def _sum(self, x, residual, context):
        """``sanitise(x + residual)``, in the residual if there is one."""
        if residual is None:
            return self._sanitised(x, context)
        host.sanitised_sum(residual, x)
        return residual

    def _sanitised(self, values, context):
        sanitised = context.scratch("sanitised", values.size, np.float32, values)
        sanitised.fill(-0.0)  # which adds nothing to any value
        host.sanitised_sum(sanitised, values)
        return sanitised


@dataclass(frozen=True)
class Coin(Compressor):
    """Sends an element, times 1/p, with probability p: unbiased. Payload: n float32 values."""

    p: float = 0.5
    name = "coin"
    promised = 0.5

    def nbytes(self, n):
        return 4 * n

    def variance(self, n):
        return 1 / self.promised - 1

    def _encode_cpu(self, x, payload, residual, context):
        kept = np.zeros_like(x) if residual is None else residual
        host.sanitised_sum(kept, x)
        sent = np.where(self._drawn(x.size, context), kept / np.float32(self.promised), 0).astype(np.float32)
        payload.view(np.float32)[...] = sent
        kept -= sent

    def _drawn(self, n, context):
        return np.random.default_rng((context.key, context.shared)).random(n) < self.p

    def _decode_cpu(self, payload, out, add, context):
        values = law_tools.sanitised(payload.view(np.float32))
        out[...] = out + values if add else values


class EvenOrOdd(Coin):
    """Sends the elements with even indices or the others: one draw of two."""

    def _drawn(self, n, context):
        return np.arange(n) % 2 == np.random.default_rng((context.key, 4)).integers(2)


class Agreed(Every):
    """The largest magnitude of all ranks in a header, then all the elements: linear, with a summary."""

    sparse = False
    element = "float32"

    def nbytes(self, n):
        return 4 * n + self.header(n)

    def header(self, n):
        return 16 if n else 0

    def summary(self, n):
        return Summary(1, "max")

    def _summarise_cpu(self, x, summary, residual, context):
        v = self._sum(x, residual, context)
        summary[0] = max(v.max(), -v.min())

    def _encode_cpu(self, x, payload, residual, context):
        v = self._sanitised(x, context) if residual is None else residual
        payload[:16].view(np.float32)[...] = context.summary[0]
        payload[16:].view(np.float32)[...] = v
        v.fill(0)

    def _decode_cpu(self, payload, out, add, context):
        if not add:
            out.fill(0)
        out += self._sanitised(payload[16:].view(np.float32), context)


@pytest.fixture
def known():
    """Registers a class for one test."""
    taken = []

    def make(cls):
        taken.append(cls.name)
        register(cls)
        return cls()

    yield make
    for name in taken:
        unregister(name)


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("cls", [Every, Agreed])
def test_a_correct_method_obeys(cls, law, known):
    law(known(cls))


@pytest.mark.parametrize("name", ["is_unbiased", "neighbours_are_rounded_independently", "keeps_its_bounds"])
def test_a_correct_random_method_obeys(name):
    getattr(laws, name)(Coin())


def test_a_method_that_draws_one_of_two_obeys():
    assert law_tools.randomness(EvenOrOdd()) == {"key"}
    laws.keys_matter_as_they_should(EvenOrOdd())


# --- broken methods: each is named in BROKEN under the law that it breaks ---------------------------------------------

BROKEN: dict[str, list[type[Compressor]]] = {}


def breaks(*names):
    """Class decorator: these laws must fail for this class."""

    def note(cls):
        for name in names:
            BROKEN.setdefault(name, []).append(cls)
        return cls

    return note


def beyond(array):
    """The array with 16 more elements than it has."""
    return as_strided(array, (array.size + 16,))


def after(cls):
    """``cls`` with an ``_encode_cpu`` that calls ``_after`` when it is done."""

    class Altered(cls):
        def _encode_cpu(self, x, payload, residual, context):
            super()._encode_cpu(x, payload, residual, context)
            self._after(x, payload, residual, context)

    return Altered


@breaks("writes_its_arrays_and_nothing_else")
class WritesAByteTooMany(after(Every)):
    def _after(self, x, payload, residual, context):
        beyond(payload)[payload.size] = 0


@breaks("writes_its_arrays_and_nothing_else")
class WritesBeyondTheResidual(after(Every)):
    def _after(self, x, payload, residual, context):
        if residual is not None:
            beyond(residual)[x.size] = 0


@breaks("writes_its_arrays_and_nothing_else")
class WritesBeyondItsScratch(after(Every)):
    def _after(self, x, payload, residual, context):
        beyond(context.scratch("more", 8, np.uint8, x))[8] = 0


@breaks("writes_its_arrays_and_nothing_else")
class WritesBeyondItsState(after(Every)):
    def _after(self, x, payload, residual, context):
        beyond(context.kept("more", x.size, x))[x.size] = 0


@breaks("writes_its_arrays_and_nothing_else")
class TrustsItsScratch(after(Every)):
    def _after(self, x, payload, residual, context):
        payload[:4].view(np.float32)[0] += context.scratch("more", 8, np.float32, x)[0]


@breaks("writes_its_arrays_and_nothing_else")
class AdvertisesAByteTooMany(Every):
    def nbytes(self, n):
        return super().nbytes(n) + (4 if n else 0)

    def _encode_cpu(self, x, payload, residual, context):
        super()._encode_cpu(x, payload[:-4], residual, context)

    def _decode_cpu(self, payload, out, add, context):
        super()._decode_cpu(payload[:-4], out, add, context)


@breaks("writes_its_arrays_and_nothing_else")
class ChangesItsInput(after(Every)):
    def _after(self, x, payload, residual, context):
        x[0] += 1


@breaks("writes_its_arrays_and_nothing_else")
class LosesAnElementBetweenChunks(after(Every)):
    def _after(self, x, payload, residual, context):
        if x.size > 1 << 17 and residual is not None:
            residual[(1 << 17) - 1] = 0


@breaks("payload_and_residual_make_up_the_input", "takes_any_input")
class LosesItsResidual(after(Every)):
    def _after(self, x, payload, residual, context):
        if residual is not None:
            residual.fill(0)


@breaks("payload_and_residual_make_up_the_input")
class KeepsHalves(after(Every)):
    def _after(self, x, payload, residual, context):
        if residual is not None:
            residual[...] = residual.clip(-6e4, 6e4).astype(np.float16)


@breaks("takes_what_is_not_finite_as_tamed", "payload_and_residual_make_up_the_input", "takes_any_input")
class LetsNaNIn(Every):
    def _sum(self, x, residual, context):
        if residual is None:
            return x.copy()
        residual += x
        return residual


@breaks("ranks_may_hold_anything")
class ScalesByTheSummary(Agreed):
    def summary(self, n):
        return Summary(1, "sum")

    def _encode_cpu(self, x, payload, residual, context):
        norm = context.summary[0] ** 2  # may be infinite
        super()._encode_cpu(x, payload, residual, context)
        payload[16:].view(np.float32)[...] *= norm / max(norm, np.float32(1e-30))


@breaks("decode_add_adds")
class OverwritesInsteadOfAdding(Every):
    def _decode_cpu(self, payload, out, add, context):
        super()._decode_cpu(payload, out, False, context)


@breaks("allocates_nothing_in_the_steady_state")
class Allocates(after(Every)):
    def _after(self, x, payload, residual, context):
        x.copy()


@breaks("zero_stays_zero")
class SendsSomethingForNothing(after(Every)):
    def _after(self, x, payload, residual, context):
        payload.view(np.float32)[...] += np.float32(1e-20)


@breaks("residual_makes_no_difference_to_the_payload")
class DiffersWithoutResidual(after(Every)):
    def _after(self, x, payload, residual, context):
        if residual is None:
            payload.view(np.float32)[...] *= np.float32(1.5)


@breaks("scales_with_powers_of_two")
class HasAThreshold(after(Every)):
    def _after(self, x, payload, residual, context):
        values = payload.view(np.float32)
        values[np.abs(values) < 0.5] = 0


@breaks("keeps_its_bounds", "keeps_its_bounds_on_bad_inputs", "takes_any_input")
class PromisesTooMuch(Every):
    def contraction(self, n):
        return 0.6


@breaks("keeps_its_bounds")
class PromisesTooSmallAVariance(Coin):
    def variance(self, n):
        return 0.8


@breaks("error_on_gaussian_values")
class ErrsAboutItsError(Every):
    def gaussian_error(self, n):
        return 0.48


@breaks("keys_matter_as_they_should")
class ClaimsToBeRandom(Every):
    def variance(self, n):
        return 1.0


@breaks("keys_matter_as_they_should")
class UsesHalfOfTheKey(Coin):
    def _drawn(self, n, context):
        return super()._drawn(n, Context(context.key & 0xFFFFFFFF, context.shared))


@breaks("is_unbiased")
class SendsTooSeldom(Coin):
    def _drawn(self, n, context):
        return np.random.default_rng(context.key).random(n) < 0.48


@breaks("is_unbiased")
class IsBiasedHereAndThere(Coin):
    """The sum of all elements is right, but every other one is too small and its neighbour too large."""

    def _drawn(self, n, context):
        return np.random.default_rng(context.key).random(n) < 0.5 + 0.06 * np.sign(law_tools.gaussian(n, 9))


@breaks("neighbours_are_rounded_independently")
class DrawsForPairs(Coin):
    def _drawn(self, n, context):
        return np.repeat(np.random.default_rng(context.key).random(n // 2 + 1) < 0.5, 2)[:n]


@breaks("feedback_stays_bounded")
class DivergesWithFeedback(Coin):
    promised = 0.2

    def contraction(self, n):
        return 0.1

    def _drawn(self, n, context):
        return np.random.default_rng(context.key).random(n) < 0.2


@breaks("feedback_stays_bounded")
class LosesALittle(after(Every)):
    """Too little for one step to show."""

    def contraction(self, n):
        return 1e-9

    def _after(self, x, payload, residual, context):
        if residual is not None:
            residual *= np.float32(1 - 1e-3)


@breaks("ranks_round_independently")
class DrawsForPairsOfRanks(Coin):
    def _drawn(self, n, context):
        return super()._drawn(n, Context(context.key // 2, context.shared))


@breaks("same_bytes_on_any_number_of_threads")
class DependsOnThreads(after(Every)):
    def _after(self, x, payload, residual, context):
        payload.view(np.float32)[...] *= np.float32(1 + numba.get_num_threads() * 1e-6)


@breaks("halves_make_the_whole")
class ForgetsTheResidualInItsSummary(Agreed):
    def _summarise_cpu(self, x, summary, residual, context):
        super()._summarise_cpu(x, summary, None, context)


@breaks("halves_make_the_whole")
class LeavesTheSummaryAsItWas(Agreed):
    def _summarise_cpu(self, x, summary, residual, context):
        first = summary[0]
        super()._summarise_cpu(x, summary, residual, context)
        summary[0] = max(summary[0], np.nan_to_num(first) + 1)


@breaks("decodes_the_sum")
class IsNotLinear(Agreed):
    def _encode_cpu(self, x, payload, residual, context):
        super()._encode_cpu(x, payload, residual, context)
        values = payload[16:].view(np.float32)
        np.sqrt(np.abs(values), out=values)


@breaks("decodes_the_sum")
class HasItsOwnHeader(Agreed):
    def _encode_cpu(self, x, payload, residual, context):
        context.summary = context.summary * np.float32(1 + (context.key & 1))
        super()._encode_cpu(x, payload, residual, context)


@breaks("several_steps_go_on")
class LearnsFromItself(Agreed):
    """What it keeps differs between the ranks, and goes into the header that they must have in common."""

    def _encode_cpu(self, x, payload, residual, context):
        own = context.kept("own", 4, x)
        super()._encode_cpu(x, payload, residual, context)
        payload[:16].view(np.float32)[...] += own
        own[...] = x[:4]


@breaks("several_steps_go_on")
class ForgetsWhenItHasLearned(Agreed):
    """In its first step nothing is lost."""

    def _encode_cpu(self, x, payload, residual, context):
        super()._encode_cpu(x, payload, residual, context)
        payload[16:].view(np.float32)[0] *= np.float32(1) - context.kept("learned", 1, x)

    def update_from_aggregate(self, payload, n, context):
        context.kept("learned", 1, payload.view(np.float32))[0] = 0.5


@breaks("tensors_have_shapes")
@dataclass(frozen=True)
class LosesAColumnOfMatrices(after(Every)):
    matrix: bool = False

    def shaped(self, shape):
        return type(self)(self.stride, len(shape) == 2)

    def _after(self, x, payload, residual, context):
        if residual is not None and self.matrix:
            residual[-1:] = 0


@breaks("takes_what_is_not_finite_as_tamed")
class KeepsNaNInItsState(after(Every)):
    def _after(self, x, payload, residual, context):
        context.kept("last", 1, x)[0] = x[-1]


@breaks("writes_its_arrays_and_nothing_else")
class UsesANameOfTheSession(after(Every)):
    def _after(self, x, payload, residual, context):
        context.kept("residual", x.size, x)


@breaks("finalizes")
class ConcludesOutside(Every):
    def finalize(self, out):
        beyond(out)[out.size] = 0


@breaks("survives_damage", "survives_any_payload")
class TrustsAnIndex(Every):
    def _decode_cpu(self, payload, out, add, context):
        super()._decode_cpu(payload, out, add, context)
        beyond(out)[int(payload[0]) % (out.size + 16)] = 0


@breaks("survives_damage", "survives_any_payload")
class DecodesToNaN(Every):
    def _sanitised(self, values, context):
        return values.copy()


@breaks("survives_damage")
class DecodesTooMuch(Every):
    def _decode_cpu(self, payload, out, add, context):
        super()._decode_cpu(payload, out, add, context)
        out *= np.float32(8)  # 8 LIMIT is infinite


@breaks("refuses_arrays_that_do_not_fit")
class TakesAnything(Every):
    def _check(self, values, payload):
        pass


@breaks("schedules_settle")
class RefusesSchedules(Every):
    def __post_init__(self):
        assert isinstance(self.stride, int), "stride must be a number"


@breaks("spec_reads_back")
class MisspellsItself(Every):
    def __str__(self):
        return "every:stride=5"


@breaks("metadata_is_consistent")
class NeedsBytesForNothing(Every):
    def nbytes(self, n):
        return super().nbytes(n) + 4


@breaks("metadata_is_consistent")
class HasAnOddHeader(Agreed):
    def header(self, n):
        return 8


@breaks("metadata_is_consistent")
class ContractsBeyondZero(Every):
    def contraction(self, n):
        return 1.5


@breaks("metadata_is_consistent")
class ReadsNothing(Every):
    def encode_traffic(self, n):
        return n


@breaks("keeps_its_bound_for_every_element")
class PromisesNoError(Every):
    bounded = True

    def largest_error(self, spread, largest, journey):
        return 0.0

    def refusal(self, x, journey, context):
        return "" if np.isfinite(x).all() else "values that are not finite"


CASES = [(name, cls) for name, classes in BROKEN.items() for cls in classes]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "cls"), CASES, ids=[f"{cls.__name__}-{name}" for name, cls in CASES])
def test_a_broken_method_breaks_its_law(name, cls, known):
    law = next(law for law in laws.LAWS if law.__name__ == name)
    with pytest.raises(AssertionError):
        law(known(cls))


def test_every_law_can_be_broken():
    assert {law.__name__ for law in laws.LAWS} == set(BROKEN)
