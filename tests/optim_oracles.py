"""Optimizers that synchronise by themselves, from their papers in float64, and what a session did."""

from __future__ import annotations

import numpy as np


class Exchanges:
    """Records what an optimizer synchronises by a session: (name, what was sent, mean), each step from the start."""

    def __init__(self, session, monkeypatch):
        self._sync, self._allreduce, self.seen = session.sync, session.allreduce, []
        monkeypatch.setattr(session, "sync", self.sync)
        monkeypatch.setattr(session, "allreduce", self.allreduce)

    def sync(self, messages):
        sent = {name: _copy(array) for name, array in messages.items()}
        result = self._sync(messages)
        self.seen += [(name, sent[name], _copy(array)) for name, array in messages.items()]
        return result

    def allreduce(self, x, **options):
        sent = _copy(x)  # before it travels
        return _Watched(self._allreduce(x, **options), options["name"].split()[-1], sent, x, self.seen)

    def taken(self):
        """By name: (sent, mean) of the last step."""
        found, self.seen = {name: (sent, mean) for name, sent, mean in self.seen}, []
        return found


class _Watched:
    def __init__(self, handle, name, sent, array, seen):
        self._handle, self._name, self._sent, self._array, self._seen = handle, name, sent, array, seen

    def wait(self):
        self._handle.wait()
        self._seen.append((self._name, self._sent, _copy(self._array)))


def _copy(array):
    return np.asarray(array).astype(np.float64)


class Oracle:
    """One tensor in float64. ``exchange(message)`` returns the mean that the ranks agreed on."""

    def __init__(self, x):
        self.x, self.m, self.t = x.astype(np.float64), np.zeros(x.shape), 0


class MomentumSGD(Oracle):
    """m ← mean of (μ m + g + λ x); x ← x - η m, or Nesterov's step along μ m + the mean gradient."""

    def step(self, g, lr, exchange, momentum, weight_decay, nesterov, warmup):
        self.t += 1
        if self.t <= warmup:
            new = momentum * self.m + exchange(g) + weight_decay * self.x
        else:
            new = exchange(momentum * self.m + g + weight_decay * self.x)
        gradient = new - momentum * self.m
        self.x = self.x - lr * (gradient + momentum * new if nesterov else new)
        self.m = new


class DeMo(Oracle):
    """x ← (1 - η λ) x - η sign of the mean; the momenta are the session's, and ``momenta_of`` has them."""

    def step(self, g, lr, exchange, weight_decay, sign):
        mean = exchange(g)
        self.x = (1 - lr * weight_decay) * self.x - lr * (np.sign(mean) if sign else mean)


def typical(v):
    """The variances with the geometric mean of the positive ones, to a power of two, in the place of zeros."""
    positive = v[v > 0]
    return np.where(v > 0, v, 2.0 ** np.floor(np.frexp(positive)[1].mean())) if positive.size else v


class ZeroOneAdam(Oracle):
    """Algorithm 1 of Lu et al. with bias correction, decoupled decay, clipping, and dense steps that move m."""

    def __init__(self, x):
        super().__init__(x)
        self.v, self.u, self.start = np.zeros(x.shape), np.zeros(x.shape), self.x
        self.updates, self.due, self.last, self.rates, self.decayed = 0, 1, 0, 0.0, 1.0

    def step(self, g, lr, exchange, warmup, kappa, double_every, longest, betas, eps, weight_decay, update_clip):
        self.t += 1
        self.clip = update_clip
        t, (first, second) = self.t, betas
        interval = 1 if t <= warmup else min(longest, 2 ** ((t - warmup - 1) // double_every))
        rate, kept = lr / (1 - first**t), 1 - lr * weight_decay
        if t == self.due:
            mean = exchange(g)
            self.m, self.v = first * self.m + (1 - first) * mean, second * self.v + (1 - second) * mean**2
            self.updates += 1
            gap = 2 ** (self.updates // kappa)
            self.due = t + gap if t + gap <= warmup else None
            self.x = kept * self.x - rate * self.m / self.root(second, eps)
            self.start, self.last = self.x, t
            return
        self.m = first * self.m + (1 - first) * g
        self.u, self.rates, self.decayed = kept * self.u + rate * self.m, kept * self.rates + rate, self.decayed * kept
        self.x = kept * self.x - rate * np.clip(self.m / self.root(second, eps), -self.clip, self.clip)
        if t - self.last >= interval:
            self.end(exchange, second, eps)

    def end(self, exchange, second, eps):
        self.m = exchange(self.u / self.rates)
        direction = np.clip(self.m / self.root(second, eps), -self.clip, self.clip)
        self.x = self.decayed * self.start - self.rates * direction
        self.start, self.last, self.u, self.rates, self.decayed = self.x, self.t, np.zeros(self.x.shape), 0.0, 1.0

    def root(self, second, eps):
        return np.sqrt(typical(self.v) / (1 - second**self.updates)) + eps


class OnebitLamb(Oracle):
    """Algorithm 1 of Li et al. with bias correction of all averages."""

    def __init__(self, x):
        super().__init__(x)
        self.v, self.fresh, self.mean, self.factor = np.zeros(x.shape), np.zeros(x.shape), 0.0, 1.0

    def step(self, g, lr, exchange, warmup, betas, eps, weight_decay):
        self.t += 1
        (first, second), frozen = betas, min(self.t, warmup)
        if self.t <= warmup:
            mean = exchange(g)
            self.m, self.v = first * self.m + (1 - first) * mean, second * self.v + (1 - second) * mean**2
            self.fresh = self.v
        else:
            new = exchange(first * self.m + (1 - first) * g)
            gradient = (new - first * self.m) / (1 - first)
            self.m, self.fresh = new, second * self.fresh + (1 - second) * gradient**2
        root, fresh = (np.sqrt(v / (1 - second**t)) + eps for v, t in ((self.v, frozen), (self.fresh, self.t)))
        moving = np.sqrt(typical(self.v) / (1 - second**frozen)) + eps
        u = self.m / (1 - first**self.t) / moving + weight_decay * self.x
        if self.t <= warmup:
            c = np.clip(np.linalg.norm(self.x) / np.linalg.norm(u), 0.01, 10)
            self.mean = 0.9 * self.mean + 0.1 * c
        else:
            limits = self.factor * 0.9, self.factor * 1.1
            self.factor = np.clip(np.clip((root / fresh).max(), 0.5, 4), *limits)
            c = self.factor * self.mean / (1 - 0.9**warmup)
        self.x = self.x - lr * c * u


class Extracted:
    """What each rank keeps and sends with decaying error feedback in float64: DeMo's momenta, SparseLoCo's residuals.

    Args:
        decay: β.
        choose: (values) → what a rank sends of them.
    """

    def __init__(self, decay, choose):
        self._decay, self._choose, self._kept = decay, choose, {}

    def mean(self, name, given):
        """The mean over the ranks of what they send; ``given``: a rank's gradient or progress each."""
        sent = []
        for rank, values in enumerate(given):
            total = self._decay * self._kept.get((name, rank), 0.0) + values
            sent.append(self._choose(total))
            self._kept[name, rank] = total - sent[-1]
        return np.mean(sent, axis=0)


def largest_in_chunks(chunk, k, values):
    """The k largest magnitudes of each chunk of a flat array, the others zero."""
    out = np.zeros_like(values)
    for start in range(0, values.size, chunk):
        part = values[start : start + chunk]
        kept = np.argsort(-np.abs(part), kind="stable")[:k]
        out[start + kept] = part[kept]
    return out


def largest_frequencies(chunk, k, values):
    """The k largest DCT-II coefficients of each chunk, transformed back; no chunk is padded here."""
    assert values.size % chunk == 0
    i, j = np.arange(chunk), np.arange(chunk)[:, None]
    matrix = np.cos(np.pi * (2 * i + 1) * j / (2 * chunk)) * np.sqrt(2 / chunk)
    matrix[0] = np.sqrt(1 / chunk)
    return (
        largest_in_chunks(chunk, k, (values.reshape(-1, chunk) @ matrix.T).ravel()).reshape(-1, chunk) @ matrix
    ).ravel()


def in_two_bits(block, values):
    """``int2`` of what is not zero, in order: -1, 0 or 1 times the largest magnitude of each block."""
    out, where = np.zeros_like(values), np.flatnonzero(values)
    for start in range(0, where.size, block):
        part = values[where[start : start + block]]
        scale = np.abs(part).max()
        out[where[start : start + block]] = np.rint(part / scale) * scale
    return out


CASES = {
    "OnebitLamb": (OnebitLamb, {"warmup": 5, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}),
    "MomentumSGD": (MomentumSGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": False, "warmup": 2}),
    "MomentumSGD Nesterov": (MomentumSGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "warmup": 0}),
    "DeMo": (DeMo, {"weight_decay": 0.1, "sign": True}),
    "DeMo plain": (DeMo, {"weight_decay": 0.1, "sign": False}),
    "ZeroOneAdam": (
        ZeroOneAdam,
        {"warmup": 8, "kappa": 2, "double_every": 3, "longest": 4}
        | {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "update_clip": 0.8},
    ),
}
"""By name: the oracle of an optimizer, and arguments that lead through all its stages in twenty steps."""

STEPS = 20


def difference(optimizer, params, grads, case, exchanges):
    """The largest error of parameters and messages over ``STEPS`` steps, relative to 1 and to the largest value.

    Args:
        optimizer: of ``espresso_mpi.optim``, over ``params``, whose session ``exchanges`` records.
        params, grads: arrays by name; ``grads(step)`` are those of this rank.
    """
    oracle, options = CASES[case]
    references = {name: oracle(_copy(array)) for name, array in params.items()}
    worst = 0.0
    for step in range(STEPS):
        lr = 0.05 / (1 + 0.1 * step)
        optimizer.lr = lr
        given = grads(step)
        optimizer.step(given)
        taken = exchanges.taken()
        for name, reference in references.items():

            def exchange(message, name=name, taken=taken):
                nonlocal worst
                sent, mean = taken.pop(name)
                worst = max(worst, _relative(sent, message))
                return mean

            reference.step(_copy(given[name]), lr, exchange, **options)
            worst = max(worst, _relative(_copy(params[name]), reference.x))
        assert not taken, f"{sorted(taken)} were synchronised in step {step + 1}, which the paper does not do"
    return worst


def _relative(found, expected):
    return float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))
