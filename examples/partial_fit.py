"""Train scikit-learn's way: each rank's `partial_fit` changes the weights, and the changes are averaged.

espresso-mpi run -n 2 -- python -m mpi4py examples/partial_fit.py

It needs: pip install scikit-learn
"""

import numpy as np
from mpi4py import MPI
from sklearn.linear_model import SGDClassifier

import espresso_mpi

comm = MPI.COMM_WORLD
shared, own = np.random.default_rng(0), np.random.default_rng([1, comm.rank])
teacher = shared.standard_normal(200)
session = espresso_mpi.Session(compressor="fp16")
model = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.01, random_state=comm.rank)


def draw(generator, rows):
    x = generator.standard_normal((rows, 200))
    return x, (x @ teacher > 0).astype(int)


model.partial_fit(*draw(shared, 10), classes=[0, 1])  # the same on every rank
for _ in range(20):
    before = {"coef": model.coef_.copy(), "intercept": model.intercept_.copy()}
    model.partial_fit(*draw(own, 200))
    change = {"coef": model.coef_ - before["coef"], "intercept": model.intercept_ - before["intercept"]}
    session.sync(change)  # the mean of what the ranks have learned
    model.coef_, model.intercept_ = before["coef"] + change["coef"], before["intercept"] + change["intercept"]
if comm.rank == 0:
    print(f"accuracy {model.score(*draw(np.random.default_rng(2), 2000)):.3f}")
session.close()
