"""Tensors that change, or are passed again, while they are in flight: without MPI."""

from __future__ import annotations

import os
import random
import threading

import numpy as np
import pytest

from espresso_mpi.arrays.buffers import adopt
from espresso_mpi.engine import guard
from espresso_mpi.errors import ConfigError, GradientError
from espresso_mpi.options import Options


def watch(value, debug=False):
    return guard.Watch("push('w')", [adopt("w", value)], debug=debug)


def refused(act, words="w: its memory was changed"):
    with pytest.raises(GradientError, match=words):
        act()


# --- changes ----------------------------------------------------------------------------------------------------------


def changes(torch):
    def accumulate(p):
        (p * 2).sum().backward()

    def zero(p):
        torch.optim.SGD([p], lr=1.0).zero_grad(set_to_none=False)

    return {
        "accumulate": accumulate,
        "zero": zero,
        "clip": lambda p: torch.nn.utils.clip_grad_norm_([p], 1.0),
        "view": lambda p: p.grad[3:5].mul_(2),
        "detached": lambda p: p.grad.detach().add_(1),
    }


@pytest.mark.parametrize("what", ["accumulate", "zero", "clip", "view", "detached"])
def test_what_torch_counts(what):
    torch = pytest.importorskip("torch")
    p = torch.nn.Parameter(torch.ones(10))
    (p * 3).sum().backward()
    watched = watch(p.grad)
    adopt("w", p.grad).array[...] = 5  # what the library writes is no change of the caller's
    watched.require_untouched()
    changes(torch)[what](p)
    refused(watched.require_untouched, r"w: its memory was changed.*push\('w'\).*last micro-batch")


def test_what_torch_counts_for_others_is_no_change():
    torch = pytest.importorskip("torch")
    flat = torch.zeros(10)
    watched = watch(flat[:5])
    flat[5:].add_(1)
    watched.require_untouched()
    with torch.inference_mode():
        watch(torch.zeros(3)).require_untouched()


@pytest.mark.parametrize("make", [lambda: np.ones((4, 6), np.float32), lambda: np.ones((6, 4), np.float16).T])
def test_debug_mode_reads_the_memory(make):
    value = make()
    watched, gradient = watch(value, debug=True), adopt("w", value)
    check = watched.check_of(gradient)
    check("before it was read")
    value[2, 1] += 1
    refused(lambda: check("before it was read"), "before it was read")
    watched.written()
    watched.require_untouched()
    value[3, 3] += 1
    refused(watched.require_untouched, "before it was waited for")
    assert watch(value).check_of(gradient) is None


@pytest.mark.parametrize("given, expected", [(None, False), ("1", True), ("0", False), ("yes", None)])
def test_the_switch_of_debug_mode(monkeypatch, given, expected):
    monkeypatch.delenv("ESPRESSO_DEBUG", raising=False)
    if given is not None:
        monkeypatch.setenv("ESPRESSO_DEBUG", given)
    options, problem = Options.checked(debug=None)
    assert (problem is None) == (expected is not None) and (problem or options.debug is expected)
    assert problem is None or "ESPRESSO_DEBUG='yes'" in problem
    assert Options.checked(debug=True)[0].debug and "debug=1" in Options.checked(debug=1)[1]


# --- memory -----------------------------------------------------------------------------------------------------------


def spans(title="sync", **arrays):
    return guard.spans([adopt(name, array) for name, array in arrays.items()], title)


def test_memory_of_one_call():
    x = np.zeros((6, 8), np.float32)
    spans(even=x[:, ::2], odd=x[:, 1::2], other=np.zeros(3))
    spans(upper=x[:3], lower=x[3:])
    for one, other in [(x[:, ::2], x[0]), (x, x.T), (x[::-1], x[5]), (x[0], x[0]), (x[:, 0:2], x[:, 1:3])]:
        refused(lambda one=one, other=other: spans(one=one, other=other), "one and other share memory|other and one")


def test_memory_of_calls_that_were_not_waited_for():
    x, claims = np.zeros((6, 8), np.float32), guard.Claims()
    first, columns = spans("push('first')", first=x[0]), spans("push('columns')", columns=x[1:, ::2])
    claims.claim(first)
    claims.claim(columns)
    claims.claim(spans(between=x[1:, 1::2]))
    words = r"again: its memory is that of {0}, which is in flight in push\('{0}'\)"
    refused(lambda: claims.claim(spans(again=x[0, 7:])), words.format("first"))
    refused(lambda: claims.claim(spans(again=x[3])), words.format("columns"))
    claims.drop(columns)
    claims.drop(first)
    claims.drop(first)
    claims.claim(spans(again=x[0]))


def test_claims_against_a_plain_search():
    """Random slices, contiguous and not, of lengths that differ much, claimed and dropped in any order."""
    rng, memory = random.Random(3), np.zeros(4000, np.float32)
    claims, held, refusals = guard.Claims(), [], 0
    for _ in range(3000):
        if held and rng.random() < 0.4:
            claims.drop(held.pop(rng.randrange(len(held)))[1])
            continue
        first, step = rng.randrange(3900), rng.choice([1, 1, 2, 3, -2])
        array = memory[first : first + rng.choice([10, 30, 1000])][::step]
        span = spans(w=array)
        taken = any(np.shares_memory(array, other) for other, _ in held)
        try:
            claims.claim(span)
            assert not taken
            held.append((array, span))
        except GradientError:
            assert taken
            refusals += 1
    assert 500 < refusals < 1500 and any(step.strides != (4,) for step, _ in held)


def many(n=20, start=0):
    return {f"t{i}": np.zeros(6, np.float32) for i in range(start, start + n)}


def test_one_array_twice_among_many():
    arrays = many()
    spans(**arrays, empty=np.zeros(0, np.float32))
    for again in (arrays["t7"], arrays["t7"][2:], arrays["t7"][::2]):
        refused(lambda again=again: spans(**arrays, again=again), "(t7 and again|again and t7) share memory")


@pytest.mark.parametrize("other", ["view", "strided view", "the same arrays"])
def test_memory_of_a_call_with_many_arrays(other):
    arrays, apart, claims = many(), np.zeros(6, np.float32), guard.Claims()
    call = spans("sync number 1", **arrays)
    views = {"view": {"v": arrays["t3"][4:]}, "strided view": {"v": arrays["t3"][::2]}}
    again = views.get(other, arrays)
    for _ in range(2):
        claims.claim(call)
        words = r"(v: its memory is that of t3|(t\d+): its memory is that of \2), which is in flight in sync number 1"
        refused(lambda: claims.claim(spans(**again)), words)
        meanwhile = spans(apart=apart)
        claims.claim(meanwhile)
        refused(lambda: claims.claim(spans(**again)), words)
        claims.drop(meanwhile)
        claims.drop(call)
    claims.claim(spans(**again))
    refused(lambda: claims.claim(call), r"t3: its memory is that of v|(t\d+): its memory is that of \1")


def test_two_calls_with_many_arrays():
    arrays, claims = list(many(200).items()), guard.Claims()
    even, odd = spans(**dict(arrays[::2])), spans(**dict(arrays[1::2]))

    def taken(which):
        for name, array in which:
            refused(lambda array=array: claims.claim(spans(w=array)), f"that of {name},")

    claims.claim(even)
    claims.claim(odd)
    taken(arrays)
    claims.drop(even)
    taken(arrays[1::2])
    claims.claim(spans(w=arrays[0][1]))
    claims.drop(odd)
    claims.drop(odd)
    claims = guard.Claims()
    claims.claim(odd)
    claims.drop(even)
    taken(arrays[1::2])


def test_a_wrong_factor_is_refused():
    from espresso_mpi.state.rescaling import checked_factor

    assert checked_factor(np.float32(0.5)) == 0.5
    for factor in (0, -1, float("inf"), float("nan"), "2", True, 1e-39, 1e39, 10**400):
        with pytest.raises(ConfigError, match="rescale: factor="):
            checked_factor(factor)


def test_a_forked_child_does_not_wait_for_a_lock_of_its_parent():
    claims = guard.Claims()
    with claims.lock:
        child = os.fork()
        if child == 0:
            taken = threading.Thread(target=claims.claim, args=([],), daemon=True)
            taken.start()
            taken.join(5)
            os._exit(int(taken.is_alive()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
