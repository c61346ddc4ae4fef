"""The CUDA kernels, run by numba's simulator, write what the CPU kernels write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SIMULATOR = Path(__file__).with_name("cuda_simulator.py")


@pytest.mark.parametrize(
    "what",
    [
        "fp16",
        "int8",
        "int8:block=100",
        "int8:rounding=stochastic",
        "onebit",
        "onebit:block=64",
        "topk:ratio=0.05",
        "collectives",
    ],
)
def test_same_bytes_as_the_cpu(what):
    """In a process of its own: the simulator has to be chosen before numba is imported."""
    run = subprocess.run([sys.executable, str(SIMULATOR), what], capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stdout + run.stderr
