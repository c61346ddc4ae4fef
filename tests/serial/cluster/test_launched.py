"""A world of one rank although the launcher started several: refused, and explained."""

import os
import subprocess
import sys

import pytest

from espresso_mpi.cli import doctor
from espresso_mpi.cluster import launched

pytestmark = pytest.mark.timeout(300)

SLURM_TASK = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "2"}
SLURM_BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("variables", "variable", "ranks", "rank", "cure"),
    [
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}, "WORLD_SIZE", 2, 1, "mpirun"),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE", 8, 0, "mpirun"),
        (SLURM_TASK, "SLURM_STEP_NUM_TASKS", 4, 2, "srun --mpi=pmix"),
        ({**SLURM_BATCH, "SLURM_STEP_ID": "0"}, "SLURM_NTASKS", 4, 0, "srun --mpi=pmix"),
        ({**SLURM_BATCH, "SLURM_PROCID": "3"}, "SLURM_NTASKS", 4, 3, "srun --mpi=pmix"),
        ({**SLURM_TASK, "PMI_SIZE": "4", "PMI_RANK": "2"}, "PMI_SIZE", 4, 2, "srun --mpi=pmix"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_SIZE", 2, 0, "espresso-mpi doctor"),
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE", 3, 1, "mpirun of the MPI"),
        ({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "1"}, "FLUX_JOB_SIZE", 2, 1, "flux run -o pmi=pmix"),
        ({"PMIX_NAMESPACE": "job@1", "PMIX_RANK": "5"}, "PMIX_RANK", 6, 5, "mpirun"),
    ],
)  # fmt: skip
def test_a_launcher_that_started_several(variables, variable, ranks, rank, cure):
    claim = launched.claim(variables)
    assert (claim.variable, claim.ranks, claim.rank) == (variable, ranks, rank)
    text = claim.problem()
    assert f"{variable}={variables[variable]}" in text and "world of 1 rank" in text
    assert cure in text and "ESPRESSO_ALLOW_SINGLE=1" in text and "{" not in text


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "many", "RANK": "0"},
        SLURM_BATCH,  # a batch script without srun is one process
        {**SLURM_BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # the shell that salloc gives
        {**SLURM_TASK, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},  # srun ... mpirun -n 1
        {"OMPI_COMM_WORLD_SIZE": "1", "WORLD_SIZE": "4"},  # a script that exports it for all its parts
        {"FLUX_JOB_SIZE": "4"},
        {"JOB_COMPLETION_INDEX": "2"},  # pods of an indexed job may be independent
        {"PMIX_NAMESPACE": "job@1", "PMIX_RANK": "0"},
    ],
)
def test_one_process_that_is_meant(variables):
    assert launched.claim(variables) is None


def test_the_doctor_explains_it():
    torchrun = {"WORLD_SIZE": "2", "RANK": "1"}
    (finding,) = doctor.alone(1, torchrun)
    assert finding.fatal and "WORLD_SIZE=2" in finding.what and "espresso-mpi run -n 2" in finding.cure
    assert not list(doctor.alone(2, torchrun))
    assert not list(doctor.alone(1, {**torchrun, "ESPRESSO_ALLOW_SINGLE": "1"}))
    assert not list(doctor.alone(1, {}))


REFUSED = """
import numpy as np
import espresso_mpi
from espresso_mpi.errors import ConfigError
from mpi4py import MPI

def refused(act):
    try:
        act()
    except ConfigError as error:
        print("refused:", "WORLD_SIZE=2" in str(error))
    else:
        print("went on")

refused(lambda: espresso_mpi.sync(np.ones(3, np.float32)))
refused(espresso_mpi.Session)
refused(lambda: espresso_mpi.Session(MPI.COMM_WORLD.Dup()))
espresso_mpi.Session(MPI.COMM_SELF).close()
import os
os.environ["ESPRESSO_ALLOW_SINGLE"] = "1"
espresso_mpi.sync(np.ones(3, np.float32))
print("allowed")
"""


def test_a_session_of_a_split_job_is_refused():
    plain = {name: value for name, value in os.environ.items() if name != "ESPRESSO_ALLOW_SINGLE"}
    argv = [sys.executable, "-c", REFUSED]
    done = subprocess.run(argv, env={**plain, "WORLD_SIZE": "2"}, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == ["refused: True"] * 3 + ["allowed"], done.stderr


def test_torchrun_is_refused(tmp_path):
    pytest.importorskip("torch.distributed.run")
    script = tmp_path / "train.py"
    script.write_text("import numpy as np, espresso_mpi\nespresso_mpi.sync(np.ones(3, np.float32))\nprint('went on')\n")
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=110)
    assert done.returncode != 0 and "went on" not in done.stdout
    assert "WORLD_SIZE=2 (torchrun or a launcher like it)" in done.stderr
