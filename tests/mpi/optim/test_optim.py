"""Optimizers that synchronise by themselves: replicas stay equal, the mean is that of numpy, errors are everybody's."""

from __future__ import annotations

import numpy as np
import pytest
from optim_oracles import (
    CASES,
    Exchanges,
    Extracted,
    difference,
    in_two_bits,
    largest_frequencies,
    largest_in_chunks,
)

from espresso_mpi import optim
from espresso_mpi.errors import ConfigError, GradientError, NonFiniteError
from espresso_mpi.optim import DiLoCo, OnebitAdam

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

SHAPES = {"w": (80, 70), "b": (9,)}


def start():
    rng = np.random.default_rng(7)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def gradients(rank, step):
    rng = np.random.default_rng([rank, step])
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def same_everywhere(world, params):
    roots = world.bcast(params)
    return all(np.array_equal(params[name], roots[name]) for name in SHAPES)


def test_onebit_adam_is_the_algorithm_on_all_ranks(world, open_session):
    """Without compression it is Adam with a frozen variance on the means of all ranks, in float64."""
    params, session = start(), open_session(compressor="none")
    adam = OnebitAdam(params, session, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1, warmup=3)
    x = {n: p.astype(np.float64) for n, p in start().items()}
    m, v = dict.fromkeys(SHAPES, 0.0), dict.fromkeys(SHAPES, 0.0)
    for step in range(8):
        adam.step(gradients(world.rank, step))
        every = [gradients(rank, step) for rank in range(world.size)]
        for name in SHAPES:
            g = np.mean([grads[name] for grads in every], axis=0, dtype=np.float64)
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.99 * v[name] + 0.01 * g**2 if step < 3 else v[name]
            root = np.sqrt(v[name] / (1 - 0.99 ** min(step + 1, 3))) + 1e-8
            x[name] -= 0.01 * (m[name] / (1 - 0.9 ** (step + 1)) / root + 0.1 * x[name])
            np.testing.assert_allclose(params[name], x[name], rtol=1e-4, atol=1e-5)
        assert same_everywhere(world, params)


def test_onebit_adam_compresses_momenta_and_torchs_has_the_same_bits(world, open_session):
    torch = pytest.importorskip("torch")
    from espresso_mpi.torch import OnebitAdam as TorchOnebitAdam

    params, other = start(), {n: torch.nn.Parameter(torch.from_numpy(p)) for n, p in start().items()}
    first, second = (open_session(compressor="onebit") for _ in range(2))
    adam = OnebitAdam(params, first, lr=0.01, warmup=2)
    theirs = TorchOnebitAdam(other.items(), second, lr=0.01, warmup=2)
    schedule = torch.optim.lr_scheduler.StepLR(theirs, 3)
    for step in range(6):
        for name, g in gradients(world.rank, step).items():
            other[name].grad = torch.from_numpy(g)
        adam.lr = theirs.param_groups[0]["lr"]
        adam.step(gradients(world.rank, step))
        theirs.step()
        schedule.step()
        if step == 3:  # a checkpoint in the middle, by torch's means
            theirs.load_state_dict(theirs.state_dict())
        for name in SHAPES:
            assert np.array_equal(params[name], other[name].detach().numpy()), (step, name)
        assert same_everywhere(world, params)


@pytest.mark.parametrize("warmup", [1, 9])
def test_a_bad_gradient_of_one_rank_changes_nothing_on_any(world, open_session, warmup):
    params = start()
    adam = OnebitAdam(params, open_session(compressor="onebit"), warmup=warmup, warmup_compressor="int8")
    adam.step(gradients(world.rank, 0))
    before, bad = {n: p.copy() for n, p in params.items()}, gradients(world.rank, 1)
    if world.rank == world.size - 1:
        bad["w"][3, 3] = np.inf
    with pytest.raises(NonFiniteError, match="w"):
        adam.step(bad)
    assert all(np.array_equal(params[n], before[n]) for n in SHAPES)
    adam.step(gradients(world.rank, 2))
    assert same_everywhere(world, params)


UNUSABLE = {
    "type": lambda grads: {**grads, "w": grads["w"].astype(np.int32)},
    "shape": lambda grads: {**grads, "b": grads["b"][:5]},
    "names": lambda grads: {"w": grads["w"]},
}
KINDS = {
    "MomentumSGD": {"warmup": 2},
    "OnebitAdam": {"warmup": 2},
    "OnebitLamb": {"warmup": 2},
    "ZeroOneAdam": {"warmup": 3},
    "DeMo": {},
}


@pytest.mark.parametrize("name", KINDS)
def test_what_one_rank_cannot_use_is_the_error_of_all(world, open_session, name):
    """In the warm-up and after it; nothing has changed, and the ranks take the next step together."""
    params = start()
    optimizer = getattr(optim, name)(params, open_session(compressor="onebit", min_bytes=0), **KINDS[name])
    for step in range(6):
        for wrong in UNUSABLE.values() if step in (1, 4) else ():
            before, given = {n: p.copy() for n, p in params.items()}, gradients(world.rank, step)
            with pytest.raises(GradientError):
                optimizer.step(wrong(given) if world.rank == world.size - 1 else given)
            assert all(np.array_equal(params[n], before[n]) for n in SHAPES)
        optimizer.step(gradients(world.rank, step))
    assert same_everywhere(world, params)


@pytest.mark.parametrize("adapter", ["espresso_mpi.optim", "espresso_mpi.torch"])
def test_an_average_that_one_rank_cannot_make_is_the_error_of_all(world, open_session, adapter):
    given, wrong = start(), world.rank == world.size - 1
    session = open_session(compressor="onebit", min_bytes=0)
    if adapter == "espresso_mpi.torch":
        torch, found = pytest.importorskip("torch"), pytest.importorskip(adapter)
        params = {name: torch.nn.Parameter(torch.from_numpy(value)) for name, value in given.items()}
        adam = found.ZeroOneAdam(list(params.items()), session, warmup=2, double_every=1, longest=4)
    else:
        adam = optim.ZeroOneAdam(given, session, warmup=2, double_every=1, longest=4)
    for step in range(4):
        if adapter == "espresso_mpi.torch":
            for name, grad in gradients(world.rank, step).items():
                params[name].grad = torch.from_numpy(grad)
            adam.step()
        else:
            adam.step(gradients(world.rank, step))
    kept = given["w"]
    if adapter == "espresso_mpi.torch":
        adam.param_groups[0]["lr"] = -1.0 if wrong else 1e-3
    elif wrong:
        given["w"] = np.zeros((3, 3), np.float32)
    with pytest.raises((ConfigError, GradientError)):
        adam.average()
    given["w"] = kept
    if adapter == "espresso_mpi.torch":
        adam.param_groups[0]["lr"] = 1e-3
    adam.average()
    assert same_everywhere(world, given)


def test_a_group_that_one_rank_cannot_use_is_the_error_of_all(world, open_session):
    torch, adapter = pytest.importorskip("torch"), pytest.importorskip("espresso_mpi.torch")
    params = {name: torch.nn.Parameter(torch.from_numpy(value)) for name, value in start().items()}
    optimizer = adapter.OnebitAdam(list(params.items()), open_session(compressor="onebit", min_bytes=0), warmup=2)
    for step in range(6):
        for name, grad in gradients(world.rank, step).items():
            params[name].grad = torch.from_numpy(grad)
        if step in (0, 3):
            before, rate = {n: p.detach().clone() for n, p in params.items()}, optimizer.param_groups[0]["lr"]
            optimizer.param_groups[0]["lr"] = -1.0 if world.rank == world.size - 1 else rate
            with pytest.raises(ConfigError, match="lr"):
                optimizer.step()
            optimizer.param_groups[0]["lr"] = rate
            assert all(torch.equal(params[n], before[n]) for n in SHAPES)
        optimizer.step()
    assert same_everywhere(world, {name: p.detach().numpy() for name, p in params.items()})


def test_a_bad_gradient_of_a_local_step_is_the_error_of_all_ranks_later(world, open_session):
    """Where it came, the parameters stay; the ranks average what the others have found, and are equal again."""
    params = start()
    adam = optim.ZeroOneAdam(params, open_session(compressor="onebit"), warmup=2, double_every=1, longest=4)
    for step in range(3):
        adam.step(gradients(world.rank, step))
    before, bad = {n: p.copy() for n, p in params.items()}, gradients(world.rank, 3)
    last = world.rank == world.size - 1
    if last:
        bad["w"][3, 3] = np.nan
    adam.step(bad)  # local
    stayed = np.array_equal(params["w"], before["w"])
    adam.step(gradients(world.rank, 4))  # local
    with pytest.raises(NonFiniteError, match="w"):
        adam.average()
    adam.average()
    same = same_everywhere(world, params)
    assert stayed == last and same and np.isfinite(params["w"]).all()


@pytest.mark.parametrize("options", [{"every": 3}, {"every": 6, "fragments": 2, "delay": 2}], ids=str)
def test_diloco_averages_the_progress_of_all_ranks(world, open_session, options):
    """Uncompressed, against the formula in float64 on the trajectories of all ranks; afterwards compressed."""
    dense, small = start(), start()
    diloco = DiLoCo(dense, open_session(), momentum=0.9, **options)
    other = DiLoCo(small, open_session(compressor="int4", min_bytes=0), **options)
    order = ["w", "b"]
    parts, every, delay = options.get("fragments", 1), options["every"], options.get("delay", 0)
    mix = 0.5 if delay else 0.0
    xs = [{n: p.astype(np.float64) for n, p in start().items()} for _ in range(world.size)]
    anchor, u, under = dict(xs[0]), dict.fromkeys(SHAPES, 0.0), {}
    for step in range(1, 14):
        for name in SHAPES:
            for params in (dense, small):
                params[name] += 0.1 * gradients(world.rank, step)[name]
            for rank, x in enumerate(xs):
                x[name] = x[name] + 0.1 * gradients(rank, step)[name].astype(np.float64)
            offset = every * (order.index(name) + 1) // 2 if parts == 2 else every
            if step % every == offset % every:
                under[name, step + delay] = np.mean([anchor[name] - x[name] for x in xs], axis=0)
            if (name, step) in under:
                d = under.pop((name, step))
                u[name] = 0.9 * u[name] + d
                anchor[name] = anchor[name] - 0.7 * (d + 0.9 * u[name])
                for x in xs:
                    x[name] = mix * x[name] + (1 - mix) * anchor[name]
        diloco.step()
        other.step()
        for name in SHAPES:
            np.testing.assert_allclose(dense[name], xs[world.rank][name], rtol=1e-4, atol=1e-4)
    assert not same_everywhere(world, dense) or world.rank == 0  # which is compared with itself
    diloco.average()
    other.average()
    found = [same_everywhere(world, dense), same_everywhere(world, small)]
    assert all(found)


PIECES = {"w": (128, 64), "v": (2048,)}
"""Shapes of whole chunks, and of payloads that need no padding to 16 bytes on their way."""


def pieces(*seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in PIECES.items()}


@pytest.mark.parametrize("sign", [True, False])
def test_demo_is_the_algorithm_on_all_ranks(world, open_session, sign):
    """Momenta that decay, their largest frequencies, the mean of these, its sign: in float64, step by step."""
    options = {"route": "flat-allgather", "feedback": "plain:decay=0.9", "min_bytes": 0}
    params, session = pieces(0), open_session(compressor="dct_topk:chunk=16,k=3", **options)
    demo = optim.DeMo(params, session, weight_decay=0.1, sign=sign)
    reference = Extracted(0.9, lambda momentum: largest_frequencies(16, 3, momentum))
    wrong = []
    for step in range(8):
        demo.lr, before = 0.05 / (1 + step), {name: array.astype(np.float64) for name, array in params.items()}
        demo.step(pieces(1, world.rank, step))
        for name in PIECES:
            given = [pieces(1, rank, step)[name].astype(np.float64).ravel() for rank in range(world.size)]
            mean = reference.mean(name, given).reshape(PIECES[name])
            along = np.where(np.abs(mean) > 1e-5, np.sign(mean), np.nan) if sign else mean
            off = params[name] - ((1 - demo.lr * 0.1) * before[name] - demo.lr * along)
            if np.nanmax(np.abs(off)) > 1e-5 or np.isnan(off).mean() > 0.01:
                wrong.append((step, name))
    same = [np.array_equal(array, root) for array, root in zip(params.values(), world.bcast([*params.values()]))]
    assert not wrong and all(same)


def test_sparse_diloco_is_sparseloco_on_all_ranks(world, open_session):
    """Residuals that decay, the largest of each chunk in two bits, their mean: in float64, and every byte counted."""
    spec = "topk_in_chunks:chunk=64,k=8,values=int2"
    options = {"route": "flat-allgather", "feedback": "plain:decay=0.95", "min_bytes": 0}
    params, session = pieces(0), open_session(compressor=spec, **options)
    sparse = DiLoCo.sparse(params, session, every=2, lr=0.8)
    reference = Extracted(0.95, lambda values: in_two_bits(64, largest_in_chunks(64, 8, values)))
    anchor = {name: array.astype(np.float64) for name, array in pieces(0).items()}
    wrong, sent = [], []
    for outer in range(5):
        moved = [{name: np.zeros(shape) for name, shape in PIECES.items()} for _ in range(world.size)]
        for inner in range(2):
            for name in PIECES:
                params[name] -= 0.1 * pieces(1, world.rank, outer, inner)[name]
                for rank, total in enumerate(moved):
                    total[name] += 0.1 * pieces(1, rank, outer, inner)[name].astype(np.float64)
            sparse.step()
        for name in PIECES:
            mean = reference.mean(name, [total[name].ravel() for total in moved])
            anchor[name] = anchor[name] - 0.8 * mean.reshape(PIECES[name])
            if np.abs(params[name] - anchor[name]).max() > 1e-5:
                wrong.append((outer, name))
        counted = session.stats().tensors.values()
        sent.append(sum(sum(tensor.bytes_by_level.values()) for tensor in counted))
    position, value = 2 + 8 / 4 + 1, 2 + 32 / 64  # low bits, share of the bitmap, a one in it; code, share of a scale
    payload = (position + value) / 8 * sum(int(np.prod(shape)) // 8 for shape in PIECES.values())
    assert not wrong and np.diff(sent).tolist() == [payload * (world.size - 1)] * 4


@pytest.mark.parametrize("case", CASES)
def test_compressed_steps_are_those_of_the_paper_and_torchs_have_the_same_bits(world, open_session, case, monkeypatch):
    """Against the paper in float64, given the means that the session made; replicas are equal where they should be."""
    torch = pytest.importorskip("torch")
    import espresso_mpi.torch as adapters

    name, options = case.split()[0], CASES[case][1]
    params, other = start(), {n: torch.nn.Parameter(torch.from_numpy(p)) for n, p in start().items()}
    first, second = (open_session(compressor="onebit") for _ in range(2))
    exchanges = Exchanges(first, monkeypatch)
    ours = getattr(optim, name)(params, first, **options)
    theirs = getattr(adapters, name)(other.items(), second, **options)
    wrong = []

    def both(step):
        for name, g in gradients(world.rank, step).items():
            other[name].grad = torch.from_numpy(g)
        theirs.param_groups[0]["lr"] = ours.lr
        theirs.step()
        return gradients(world.rank, step)

    error = difference(ours, params, both, case, exchanges)
    for optimizer in (ours, theirs):
        if hasattr(optimizer, "average"):
            optimizer.average()
    wrong += [n for n in SHAPES if not np.array_equal(params[n], other[n].detach().numpy())]
    theirs.load_state_dict(theirs.state_dict())
    same = same_everywhere(world, params)
    assert error < 2e-5 and not wrong and same


def test_torch_tells_of_an_optimizer_that_does_not_go_with_its_compressor(world, open_session, caplog):
    torch = pytest.importorskip("torch")
    from espresso_mpi.torch import GradientSync

    class Fused(torch.optim.Optimizer):  # AdamW of another package
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr, "betas": (0.9, 0.999)})

        def step(self, closure=None):
            pass

    lines = []
    cases = [
        ("AdamW", {}, "onebit"),
        (Fused, {}, "onebit"),
        ("SGD", {}, "onebit"),
        ("AdamW", {}, "int8"),
        ("SGD", {"momentum": 0.9}, "onebit"),
        ("SGD", {"momentum": 0.9}, "int2"),
        ("AdamW", {}, "powersgd:rank=2"),
    ]
    for optimizer, options, compressor in cases:
        model = torch.nn.Linear(80, 70)
        sync = GradientSync(model, open_session(compressor=compressor))
        make = getattr(torch.optim, optimizer) if isinstance(optimizer, str) else optimizer
        stepped = make(model.parameters(), lr=0.1, **options)
        caplog.clear()
        for _ in range(2):
            model(torch.ones(4, 80)).sum().backward()
            sync.wait()
            stepped.step()
        lines.append(caplog.text.count(f"with compressor {str(compressor)!r}"))
        sync.close()
    once = int(world.rank == 0)
    assert lines == [once, once, 0, 0, once, 0, once]


@pytest.mark.parametrize("name", ["MomentumSGD", "OnebitAdam"])
def test_optax_has_the_steps_of_plain_arrays(world, open_session, name):
    """Inside jit, through both stages, with the same messages: equal but for the order of float32 operations."""
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    import espresso_mpi.jax as adapter

    inside, outside = (open_session(compressor="fp16") for _ in range(2))  # where a last bit changes no whole code
    if name == "OnebitAdam":
        options = {"warmup": 3, "warmup_compressor": "int8", "update_clip": 0.3}
        made = adapter.scale_by_onebit_adam(inside, b2=0.99, **options)
        chain = optax.chain(made, optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(0.01))
        optimizer = optim.OnebitAdam(
            params := start(), outside, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1, **options
        )
    else:
        made = adapter.compressed_trace(inside, decay=0.8, nesterov=True, warmup=2)
        chain = optax.chain(made, optax.scale_by_learning_rate(0.01))
        optimizer = optim.MomentumSGD(params := start(), outside, lr=0.01, momentum=0.8, nesterov=True, warmup=2)
    theirs = {n: jax.numpy.asarray(p) for n, p in start().items()}
    state, worst = chain.init(theirs), 0.0

    @jax.jit
    def step(params, state, grads):
        updates, state = chain.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(8):
        if number == 4:
            state = jax.tree_util.tree_map(jax.numpy.asarray, jax.tree_util.tree_map(np.asarray, state))  # a checkpoint
        theirs, state = step(theirs, state, gradients(world.rank, number))
        optimizer.step(gradients(world.rank, number))
        worst = max(worst, *(float(np.abs(np.asarray(theirs[n]) - params[n]).max()) for n in SHAPES))
    bad = gradients(world.rank, 0)
    if world.rank == world.size - 1:
        bad["w"][0, 0] = np.nan
    with pytest.raises(Exception, match="NonFiniteError"):
        jax.block_until_ready(step(theirs, state, bad))
    with pytest.raises(Exception, match="NonFiniteError"):  # in the first stage, too
        jax.block_until_ready(step(theirs, chain.init(theirs), bad))
    same = same_everywhere(world, {n: np.asarray(p) for n, p in theirs.items()})
    assert worst < 2e-5 and same
