"""The probe for device pointers: fake programs in the place of mpirun, and what a job inside a job may know."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
from patience import until
from rank_jobs import run_job

from espresso_mpi.cluster import launch
from espresso_mpi.collectives.messages import probe, probe_program, switches
from espresso_mpi.errors import ConfigError

pytestmark = pytest.mark.timeout(300)


def result_on(program: str, limit: float = 20.0) -> probe.ProbeResult:
    return probe.run([sys.executable, "-c", program], dict(os.environ), limit)


def test_two_processes_that_report_success_pass():
    result = result_on(f"print({probe.PASSED!r}); print('a library talks'); print({probe.PASSED!r})")
    assert result.works
    assert "two processes" in result.why


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (f"print({probe.PASSED!r})", "exit status 0"),  # two jobs of one process, or one that fell silent
        ("pass", "exit status 0"),
        (f"print({probe.PASSED!r}); print({probe.PASSED!r}); raise SystemExit(3)", "exit status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
        ("import sys; sys.exit('mpirun: no such network')", "no such network"),
        ("import sys; print('cuMemcpy failed', file=sys.stderr); print('-' * 70, file=sys.stderr)", "cuMemcpy failed"),
        (
            f"import sys; print({probe.PROBLEM!r}, 'messages of 1024 bytes arrived with wrong content', "
            "file=sys.stderr); sys.exit('mpirun: a process ended')",
            "messages of 1024 bytes arrived with wrong content",
        ),
    ],
)
def test_everything_else_fails_and_says_why(program, why):
    result = result_on(program)
    assert not result.works
    assert why in result.why


def test_a_program_that_hangs_is_stopped():
    result = result_on("import time; time.sleep(1000)", limit=0.5)
    assert result == probe.ProbeResult(False, "no answer within 0.5 s")


def test_a_program_that_will_not_stop_is_killed_with_its_children(monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "_GRACE_S", 0.5)
    mark = tmp_path / "pid"
    child = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    stubborn = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(1000)"
    )
    assert not result_on(stubborn, limit=3.0).works
    assert until(lambda: not alive(int(mark.read_text())))


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as status:
            return status.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_program_that_does_not_exist():
    result = probe.run(["/nowhere/mpirun"], {}, 1.0)
    assert not result.works
    assert "could not be started" in result.why


def test_no_mpirun(monkeypatch):
    def missing():
        raise ConfigError("no mpirun found")

    monkeypatch.setattr(probe, "find_mpirun", missing)
    probe._RESULTS.clear()
    assert probe.probe_gpu(gpu=0) == probe.ProbeResult(False, "it could not be started: no mpirun found")
    probe._RESULTS.clear()


def test_a_process_probes_once(monkeypatch):
    runs = []
    monkeypatch.setattr(probe, "find_mpirun", lambda: launch.Mpirun("/x/mpirun", "Open MPI", "5.0.11"))
    monkeypatch.setattr(probe, "run", lambda *given: runs.append(given) or probe.ProbeResult(True, "fake"))
    probe._RESULTS.clear()
    assert probe.probe_gpu(3.2, gpu=1) == probe.probe_gpu(3.2, gpu=1)
    probe._RESULTS.clear()
    ((command, environment, limit, processes),) = runs
    assert command[:3] == ["/x/mpirun", "-n", "2"]
    assert command[-1] == "4"  # whole seconds, no fewer than the limit
    assert environment[probe.DEVICE] == "1"
    assert (limit, processes) == (3.2, 2)


RANK = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_UNIVERSE_SIZE": "8",
    "OMPI_MCA_num_procs": "8",
    "OMPI_MCA_initial_wdir": "/home",
    "OMPI_MCA_ess_base_jobid": "7",
    "PMIX_RANK": "3",
    "PMIX_SERVER_URI41": "prterun-vm@0.0;tcp4://127.0.0.1:1",
    "PRTE_LAUNCHED": "1",
    "PRTE_MCA_plm_ssh_agent": "/x/agent",
    "PMI_FD": "9",
    "PMI_RANK": "3",
    "MPI_LOCALRANKID": "1",
    "HYDRA_LAUNCHER": "slurm",
    "SLURM_JOB_ID": "77",
    "SLURM_NODELIST": "n[1-4]",
    "PBS_NODEFILE": "/x/nodes",
    "LSB_HOSTS": "a b",
    "MV2_COMM_WORLD_RANK": "3",
    "PALS_RANKID": "3",
}
SETTINGS = {
    "OMPI_MCA_pml": "ucx",
    "OMPI_MCA_opal_cuda_support": "true",
    "UCX_TLS": "rc,cuda_copy",
    "CUDA_VISIBLE_DEVICES": "2",
    "MV2_USE_CUDA": "1",
    "MPIR_CVAR_ENABLE_GPU": "1",
    "HOME": "/home/x",
}


def test_a_job_of_its_own_knows_the_settings_but_not_the_job_around_it():
    seen = probe.surroundings(RANK | SETTINGS)
    assert {name: seen[name] for name in SETTINGS} == SETTINGS
    assert not set(RANK) & set(seen)
    assert seen["OMPI_ALLOW_RUN_AS_ROOT"] == "1"


def test_a_job_between_nodes_keeps_how_they_are_reached():
    seen = probe.surroundings(RANK | SETTINGS, elsewhere=True)
    kept = {"PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER", "SLURM_JOB_ID", "SLURM_NODELIST", "PBS_NODEFILE", "LSB_HOSTS"}
    assert set(RANK) & set(seen) == kept
    options = probe.on_nodes(launch.Mpirun("/x", "Open MPI", "5.0.11"), ["a", "b"], seen)
    assert options[:2] == ["--host", "a:1,b:1"] and "UCX_TLS" in options and "SLURM_JOB_ID" not in options
    assert probe.on_nodes(launch.Mpirun("/x", "MPICH", "4.3"), ["a", "b"], seen) == ["-hosts", "a,b", "-ppn", "1"]


@pytest.mark.parametrize("size", range(2, 8))
def test_every_pair_of_processes_meets_once(size):
    every = [list(probe_program.partners(SimpleNamespace(rank=rank, size=size))) for rank in range(size)]
    assert [sorted([rank, *others]) for rank, others in enumerate(every)] == size * [list(range(size))]
    met, left = set(), [iter(others) for others in every]
    ahead = [next(others, None) for others in left]
    while any(other is not None for other in ahead):
        pairs = [(a, b) for a, b in enumerate(ahead) if b is not None and ahead[b] == a]
        assert pairs, "all wait for others"
        met |= set(pairs)
        for rank, _ in pairs:
            ahead[rank] = next(left[rank], None)
    assert len(met) == size * (size - 1)


SAYS = """
[a:1] mca: base: components_open: found loaded component ob1
[a:1] selected cuda
[a:1] selected ob1 best priority 20
[a:1] select: component ob1 selected
[a:1] mca: bml: Using self btl for send to [[1,1],0] on node a
[a:1] mca: bml: Using smcuda btl for send to [[1,1],1] on node a
[b:2] mca: bml: Using smcuda btl for send to [[1,1],0] on node a
"""
BY_UCX = """
[a:1] selected null
[a:1] select: component ucx selected
[16.08] [a:7:0]     ucp_worker.c:1720 UCX  INFO  ep_cfg[1]: tag(rc_mlx5/mlx5_0:1);
[16.09] [a:7:0]     ucp_worker.c:1784 UCX  INFO    0x25 intra-node cfg#2 tag(sysv/memory cuda_copy/cuda) rma(x)
"""


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        (SAYS, "pml ob1, btl smcuda, accelerator cuda"),
        (BY_UCX, "pml ucx, UCX tag(rc_mlx5/mlx5_0:1), UCX tag(sysv/memory cuda_copy/cuda)"),
        ("==== x ====\nlibfabric provider: tcp;ofi_rxm - 10.0.0.0/8\n", "MPICH's provider tcp;ofi_rxm"),
        ("nothing", ""),
    ],
)
def test_what_libraries_say_of_their_transport(said, seen):
    assert probe.transports(said) == seen
    result = result_on(f"import sys; print({said!r}, file=sys.stderr); sys.exit(7)")
    assert result.transport == seen and "exit status 7: " + ("nothing" if said == "nothing" else "") in result.why


NESTED = """
import os, sys
from mpi4py import MPI
from espresso_mpi.cluster import launch
from espresso_mpi.collectives.messages import probe
answer = None
if MPI.COMM_WORLD.rank == 0:
    inner = "from mpi4py import MPI; c = MPI.COMM_WORLD; c.allgather(c.rank); print(%r * (c.size == 2))" % probe.PASSED
    command = [launch.find_mpirun().path, "-n", "2", sys.executable, "-c", inner]
    answer = probe.run(command, probe._TALKING | probe.surroundings(os.environ), 40.0)
answer = MPI.COMM_WORLD.bcast(answer)  # the job around it still works
if MPI.COMM_WORLD.rank == 1:
    print("answer", answer.works, answer.transport)
"""


def test_a_real_job_runs_inside_a_rank_of_another():
    done = run_job("-c", NESTED)
    assert "answer True" in done.stdout, done.stdout + done.stderr


def test_the_real_program_fails_with_a_reason_where_there_is_no_gpu():
    program = [sys.executable, "-m", "espresso_mpi.collectives.messages.probe_program", "40"]
    # A GPU that no node has: also a node with one must answer, not crash.
    result = probe.run(program, {**probe.surroundings(os.environ), probe.DEVICE: "4096"}, 60.0)
    assert not result.works
    assert "Error" in result.why


def test_a_launcher_that_does_not_know_the_library_is_noticed():
    class Alone:
        size = 1

    class Mpi:
        @staticmethod
        def get_vendor():
            return ("Open MPI", (5, 0, 11))

    assert "another MPI library" in probe_program.examine(Mpi, Alone)


@pytest.mark.parametrize(("setting", "way"), [(None, None), ("auto", None), ("1", True), ("0", False)])
def test_the_switch(monkeypatch, setting, way):
    monkeypatch.delenv(switches.SWITCH, raising=False)
    if setting is not None:
        monkeypatch.setenv(switches.SWITCH, setting)
    assert switches.device_aware() is way


@pytest.mark.parametrize("setting", ["", "yes", "2", "AUTO"])
def test_other_values_of_the_switch_are_refused(monkeypatch, setting):
    monkeypatch.setenv(switches.SWITCH, setting)
    with pytest.raises(ConfigError, match=r"ESPRESSO_CUDA_AWARE=.*expected 1 .* 0 .* or auto"):
        switches.device_aware()
