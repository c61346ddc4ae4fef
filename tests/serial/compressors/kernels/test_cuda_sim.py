"""The CUDA kernels, run by numba's simulator, write what the CPU kernels write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from espresso_mpi.compressors import Compressor, get, names

SIMULATOR = Path(__file__).parents[3] / "cuda_simulator.py"


LIMIT = 1800


@pytest.fixture(scope="module")
def runs(request):
    """What the simulator says of everything that is selected: processes of its own, one for every core, share it.

    In processes because the simulator has to be chosen before numba is imported.
    """
    quick = ["--quick"] if request.config.getoption("quick") else []
    wanted = [item.callspec.params["what"] for item in request.session.items if "runs" in item.fixturenames]
    cores = 1 if "PYTEST_XDIST_WORKER" in os.environ else os.cpu_count() or 1
    parts = [part for part in (wanted[core::cores] for core in range(cores)) if part]
    with ThreadPoolExecutor(cores) as pool:
        yield {what: run for part in parts for run in [pool.submit(_run, [*quick, *part])] for what in part}


def _run(wanted):
    command = [sys.executable, str(SIMULATOR), *wanted]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT - 20)


@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("what", [*names(), "collectives", "optimizers"])
def test_same_bytes_as_the_cpu(what, runs):
    run = runs[what].result()
    assert run.returncode == 0, run.stdout + run.stderr
    problems = json.loads(run.stdout)[what]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", names(installed=False))
def test_every_method_has_gpu_kernels(name):
    """The base class can go through host memory; that is for methods of users and other packages."""
    cls = type(get(name))
    wanted = ["_encode_cuda", "_decode_cuda"]
    if cls._summarise_cpu is not Compressor._summarise_cpu:
        wanted.append("_summarise_cuda")
    missing = [method for method in wanted if getattr(cls, method) is getattr(Compressor, method)]
    assert not missing, f"{name} does not override {' and '.join(missing)}"
