"""What is synchronised while a cluster is measured."""

from __future__ import annotations

import numpy as np

from ...collectives.job import Job
from ...compressors import Compressor
from ...feedback import AUTO, NO_FEEDBACK


def job_of(method: Compressor | None, n: int) -> Job:
    """One run that keeps nothing for the next, for a tensor of n elements."""
    feedback = NO_FEEDBACK if method is None else AUTO.resolved(method, n)
    return Job("measuring", {}, feedback, seed=0, step=0)


def normal(n: int, seed: int) -> np.ndarray:
    """Normal float32 values."""
    return np.random.default_rng(seed).standard_normal(n, np.float32)
