"""The doctor: the facts are plain JSON, and every check finds its problem and names a cure."""

import json
import os
import platform
import subprocess
import sys

import pytest

from espresso_mpi.cli import doctor
from espresso_mpi.cluster import environment, lab, launch
from espresso_mpi.collectives.messages import probe

pytestmark = pytest.mark.timeout(300)

HEALTHY = {
    "mpi": {"library": "Open MPI", "version": "5.0.11", "standard": "3.1", "thread_level": "MULTIPLE"},
    "mpirun": {"path": "/x/mpirun", "flavour": "Open MPI", "version": "5.0.11"},
    "job": {"ranks": 2, "ranks_per_node": 2, "nodes": 1},
    "cores": 4,
    "threads": {"NUMBA_THREADING_LAYER": "omp", "NUMBA_NUM_THREADS": None, "OMP_NUM_THREADS": None},
    "threading_layers": ["omp", "workqueue"],
    "gpus": [],
    "cuda_aware": (False, "asked"),
    "gpu_messages": {"device_pointers": None, "why": "no GPU", "forced": False},
    "f16c": True,
    "mpi_compression": [],
    "mpi_pytest": None,
    "shared_memory_bytes": 1 << 30,
    "single_copy": "once where that is quicker: 2 ranks have tried it with each other",
    "lab_problems": [],
}


def found(**changes):
    facts = HEALTHY | changes
    return [finding for check in doctor.CHECKS for finding in check(facts)]


def only(**changes):
    findings = found(**changes)
    assert len(findings) == 1, findings
    assert findings[0].cure
    return findings[0]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.delenv("OMPI_MCA_mpi_yield_when_idle", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda *arguments, **options: None)  # no nvidia-smi


def test_a_healthy_node_has_no_findings():
    assert found() == []


def test_ranks_that_may_not_copy_from_each_other():
    refused = "twice, through the shared window: the memory of another rank: Operation not permitted"
    finding = only(single_copy=f"{refused} (kernel.yama.ptrace_scope=1)")
    assert "ptrace_scope=1" in finding.what and "SYS_PTRACE" in finding.cure
    assert found(single_copy="twice, through the shared window: ESPRESSO_SINGLE_COPY=0") == []


def test_no_mpirun():
    assert "cannot be started" in only(mpirun="no mpirun found").what


def test_mpirun_of_another_library():
    finding = only(mpirun={"path": "/x/mpirun", "flavour": "MPICH", "version": "5.0.2"})
    assert finding.fatal
    assert "mpi4py uses Open MPI" in finding.what


def test_low_thread_level():
    assert "FUNNELED" in only(mpi=HEALTHY["mpi"] | {"thread_level": "FUNNELED"}).what


@pytest.mark.parametrize(
    ("pinned", "layers", "cure", "fatal"),
    [
        ("omp", ["workqueue"], "libgomp1", True),
        ("tbb", ["omp", "workqueue"], "pip install tbb", True),
        (None, ["workqueue"], "libgomp1", False),
        ("workqueue", ["omp", "workqueue"], "unset NUMBA_THREADING_LAYER", False),
    ],
)
def test_threading_layers(pinned, layers, cure, fatal):
    threads = HEALTHY["threads"] | {"NUMBA_THREADING_LAYER": pinned}
    finding = only(threads=threads, threading_layers=layers)
    assert cure in finding.cure
    assert finding.fatal == fatal


def test_numba_that_cannot_be_loaded():
    assert only(threading_layers="ImportError: llvmlite").fatal


def test_oversubscribed_cores(monkeypatch):
    oversubscribed = {"ranks": 8, "ranks_per_node": 8, "nodes": 1}
    assert "8 ranks share 4 cores" in only(job=oversubscribed).what
    monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", "1")
    assert found(job=oversubscribed) == []


GPU = {"name": "GPU", "compute_capability": [9, 0], "memory_bytes": 1 << 36}


def messages(device_pointers, forced=False):
    return {"device_pointers": device_pointers, "why": "because", "forced": forced}


def test_gpus():
    finding = only(gpus=[GPU], gpu_messages=messages(False))
    assert "through host memory; because" in finding.what
    assert "ESPRESSO_CUDA_AWARE=1 forces" in finding.cure
    assert found(gpus=[GPU], gpu_messages=messages(True)) == []
    assert found(gpus=[GPU], gpu_messages=messages(False, forced=True)) == []  # as the user has it
    assert only(gpus=[GPU], gpu_messages=messages(None, forced=True)).fatal
    assert "driver" in only(gpus="CudaSupportError: driver").what


def test_the_way_of_gpu_messages(monkeypatch):
    monkeypatch.delenv("ESPRESSO_CUDA_AWARE", raising=False)
    monkeypatch.setattr(probe, "probe_gpu", lambda gpu: probe.ProbeResult(True, f"tried GPU {gpu}"))
    assert doctor._gpu_messages([])["device_pointers"] is None
    assert doctor._gpu_messages("no driver")["why"] == "no GPU"
    assert doctor._gpu_messages([GPU]) == {
        "device_pointers": True,
        "why": "the probe says: tried GPU 0",
        "forced": False,
    }
    monkeypatch.setattr(probe, "probe_gpu", None)  # not asked where the user has settled it
    for setting, way in [("0", False), ("1", True), ("maybe", None)]:
        monkeypatch.setenv("ESPRESSO_CUDA_AWARE", setting)
        answer = doctor._gpu_messages([GPU])
        assert answer["device_pointers"] is way
        assert answer["forced"]
        assert setting in answer["why"]


def test_compression_by_mpi():
    variables = {
        "MPIR_CVAR_ENABLE_COMPRESSION": "1",
        "MPIR_CVAR_ENABLE_PT2PT_GPU_COMPRESSION": "1",
        "MVP_ENABLE_COMPRESSION": "0",
        "MV2_USE_COMPRESSION": "1",
        "MPIR_CVAR_COMPRESSION_BUFFER_SIZE": "1",
        "UCX_TLS": "rc",
    }
    settings = environment.mpi_compression(variables)
    assert settings == [
        "MPIR_CVAR_ENABLE_COMPRESSION=1",
        "MPIR_CVAR_ENABLE_PT2PT_GPU_COMPRESSION=1",
        "MV2_USE_COMPRESSION=1",
    ]
    finding = only(mpi_compression=settings)
    assert "changes them" in finding.what
    assert "unset MPIR_CVAR_ENABLE_COMPRESSION, " in finding.cure


def test_float16_needs_a_processor_that_converts_it():
    finding = only(f16c=False)
    assert "F16C" in finding.what
    assert "NUMBA_CPU_NAME" in finding.cure
    assert found(f16c=None) == []


@pytest.mark.parametrize(
    ("text", "answer"),
    [("flags\t\t: fpu sse2 f16c\n", True), ("flags\t\t: fpu sse2\n", False), ("Features\t: fp asimd\n", None)],
)
def test_f16c_of_the_processor(tmp_path, text, answer):
    listing = tmp_path / "cpuinfo"
    listing.write_text("processor\t: 0\n" + text)
    assert environment.f16c({}, listing) is answer


@pytest.mark.skipif(platform.machine() != "x86_64", reason="F16C is x86's")
def test_f16c_of_a_processor_named_to_numba(tmp_path):
    listing = tmp_path / "none"
    assert environment.f16c({"NUMBA_CPU_NAME": "generic"}, listing) is False
    assert environment.f16c({"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+sse2,+f16c"}, listing) is True
    assert environment.f16c({"NUMBA_CPU_FEATURES": "+sse2"}, listing) is False
    assert environment.f16c({"NUMBA_CPU_NAME": "haswell"}, listing) is None


def test_conflicting_pytest_plugins():
    assert "pip uninstall mpi-pytest" in only(mpi_pytest="2.0").cure


def test_small_shared_memory():
    assert "64 MiB" in only(shared_memory_bytes=64 << 20).what


def test_lab_problems_keep_their_cures():
    finding = only(lab_problems=["the program `tc` is missing; install the package iproute2"])
    assert finding == doctor.Finding("the lab cannot run: the program `tc` is missing", "install the package iproute2")


@pytest.mark.parametrize(
    ("library", "variables", "wrong"),
    [
        ("Open MPI", {"OMPI_COMM_WORLD_SIZE": "4"}, False),
        ("MPICH", {"PMI_SIZE": "4"}, False),
        ("Intel MPI", {"PMI_SIZE": "4"}, False),
        ("Open MPI", {}, False),
        ("Open MPI", {"PMI_SIZE": "4", "SLURM_PROCID": "0"}, False),
        ("Open MPI", {"PMI_SIZE": "4"}, True),
        ("MPICH", {"OMPI_COMM_WORLD_SIZE": "4"}, True),
    ],
)
def test_the_wrong_launcher_is_noticed(library, variables, wrong):
    finding = doctor.wrong_launcher(library, variables)
    assert (finding is not None) == wrong
    if finding:
        assert finding.fatal
        assert "4 separate jobs" in finding.what


def test_ranks_with_different_versions():
    def rank(numpy, hostname):
        return {"versions": {"numpy": numpy, "mpi4py": "4"}, "python": "3.11", "hostname": hostname}

    (finding,) = doctor._ranks_differ([rank("2.0", "a"), rank("2.0", "b"), rank("1.26", "c")])
    assert "2.0 on rank 0 (a), 1.26 on rank 2 (c)" in finding.what
    assert not finding.fatal


def test_the_environment_is_plain_json_and_loads_no_mpi():
    code = (
        "import json, sys\nfrom espresso_mpi.cluster.environment import environment\nfacts = environment()\n"
        "assert json.loads(json.dumps(facts)) == facts\n"
        "assert facts['mpi'] is None and 'mpi4py.MPI' not in sys.modules\n"
        "assert facts['cores'] >= 1 and facts['memory_bytes'] > 1 << 20 and facts['cpu']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_child_that_dies_is_reported():
    assert environment._ask_child("import os; os.abort()").startswith("the check ended with exit status")
    assert environment._ask_child("raise OSError('no driver')") == "OSError: no driver"


def run_doctor(tmp_path, *prefix):
    report = tmp_path / "doctor.json"
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "espresso_mpi", "doctor", "--json", str(report)],
        env=launch.child_environment(1),
        capture_output=True,
        text=True,
        timeout=80,
    )
    return done, json.loads(report.read_text())


def test_on_one_process(tmp_path):
    done, report = run_doctor(tmp_path)
    assert done.returncode == int(report["fatal"])
    assert report["environment"]["mpi"]["thread_level"]
    assert "threads per rank" in done.stdout


@pytest.mark.thorough  # test_in_the_lab has ranks as well
def test_under_mpirun(tmp_path):
    done, report = run_doctor(tmp_path, sys.executable, "-m", "espresso_mpi", "run", "-n", "2", "--")
    assert done.returncode == 0, done.stderr
    assert report["environment"]["job"] == {"ranks": 2, "ranks_per_node": 2, "nodes": 1}
    assert done.stdout.count("threads per rank") == 1


@pytest.mark.skipif(bool(lab.problems()), reason="the lab cannot run here")
def test_in_the_lab(tmp_path):
    lab_command = ["lab", "--nodes=2", "--ranks=1", "--rate=unlimited", "--timeout=60", "--"]
    done, report = run_doctor(tmp_path, sys.executable, "-m", "espresso_mpi", *lab_command)
    assert done.returncode == 0, done.stderr
    assert report["environment"]["hostnames"] == ["host0", "host1"]
    assert report["environment"]["lab"] == "nodes=2 ranks=1 rate=unlimited"
    assert report["environment"]["job"] == {"ranks": 2, "ranks_per_node": 1, "nodes": 2}
    assert done.stdout.count("threads per rank") == 1


def test_launched_by_another_mpirun(monkeypatch, tmp_path):
    from mpi4py import MPI

    size = "PMI_SIZE" if MPI.get_vendor()[0] == "Open MPI" else "OMPI_COMM_WORLD_SIZE"
    monkeypatch.setitem(os.environ, size, "4")
    done, report = run_doctor(tmp_path)
    assert done.returncode == 1
    assert "separate jobs" in report["findings"][0]["what"]
