"""Train a small network in JAX: the gradients are averaged inside `jit`, by optax.

espresso-mpi run -n 2 -- python -m mpi4py examples/train_jax.py

It needs: pip install jax optax
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI

import espresso_mpi
import espresso_mpi.jax

comm = MPI.COMM_WORLD
shared, own = np.random.default_rng(0), np.random.default_rng([1, comm.rank])
teacher = shared.standard_normal((32, 10)).astype(np.float32)
params = {
    "hidden": jnp.asarray(shared.standard_normal((32, 128), dtype=np.float32) / 6),
    "output": jnp.asarray(shared.standard_normal((128, 10), dtype=np.float32) / 11),
}
session = espresso_mpi.Session(compressor="int8")
optimizer = optax.chain(espresso_mpi.jax.synchronize(session), optax.adamw(1e-2))
state = optimizer.init(params)


def loss_of(params, x, y):
    logits = jax.nn.relu(x @ params["hidden"]) @ params["output"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@jax.jit
def step(params, state, x, y):
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


for number in range(201):
    x = own.standard_normal((64, 32), dtype=np.float32)
    params, state, loss = step(params, state, x, np.argmax(x @ teacher, axis=1))
    if number % 50 == 0:
        mean = session.allreduce(np.array([float(loss)]))[0]
        if comm.rank == 0:
            print(f"step {number:3}: loss {mean:.3f}", flush=True)
session.close()
