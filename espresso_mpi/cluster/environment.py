"""Properties of this node and job, for the results of benchmarks and for ``espresso-mpi doctor``.

Nothing here communicates, so each rank may call it at any time.
"""

import ctypes
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from espresso_mpi.cluster import launch

PACKAGES = ("espresso-mpi", "numpy", "numba", "numba-cuda", "cupy", "mpi4py", "torch")
_CUPY_NAMES = ("cupy", "cupy-cuda12x", "cupy-cuda13x")
_CHILD_TIMEOUT_S = 120
_ON = ("1", "true", "yes", "on", "True", "TRUE")

_LAYERS_PROGRAM = """
import importlib, json
def usable(name):
    try:
        importlib.import_module("numba.np.ufunc." + name)
    except ImportError:
        return False
    return True
names = {"tbb": "tbbpool", "omp": "omppool", "workqueue": "workqueue"}
print(json.dumps([layer for layer, name in names.items() if usable(name)]))
"""

_GPU_PROGRAM = """
import json
from numba import cuda
def describe(device):
    with device:
        memory = cuda.current_context().get_memory_info().total
    name = device.name.decode() if isinstance(device.name, bytes) else device.name
    return {"name": name, "compute_capability": list(device.compute_capability), "memory_bytes": memory}
print(json.dumps([describe(d) for d in cuda.list_devices()] if cuda.is_available() else []))
"""


def environment() -> dict[str, Any]:
    """MPI, ranks, processor, memory, threads, versions and date, as values for JSON.

    MPI is only described if this process has loaded it.
    """
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "mpi": mpi(),
        "job": job(),
        "lab": os.environ.get("ESPRESSO_LAB"),
        "hostname": platform.node(),
        "system": f"{platform.system()} {platform.release()} {platform.node()}",
        "cpu": cpu_model(),
        "cores": launch.cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": threads(),
        "python": platform.python_version(),
        "versions": versions(),
    }


def mpi() -> dict[str, Any] | None:
    """The MPI library that this process has loaded: name, version, standard, thread level; None if none."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None:
        return None
    name, version = module.get_vendor()
    running = module.Is_initialized() and not module.Is_finalized()
    levels = {
        module.THREAD_SINGLE: "SINGLE",
        module.THREAD_FUNNELED: "FUNNELED",
        module.THREAD_SERIALIZED: "SERIALIZED",
        module.THREAD_MULTIPLE: "MULTIPLE",
    }
    return {
        "library": name,
        "version": ".".join(map(str, version)),
        "standard": ".".join(map(str, module.Get_version())),
        "thread_level": levels[module.Query_thread()] if running else None,
    }


def job(variables: Mapping[str, str] = os.environ) -> dict[str, int]:
    """Number of nodes and ranks of this job, by what this rank knows without communication.

    The number of nodes assumes as many ranks on every node as on this one.
    """
    module = sys.modules.get("mpi4py.MPI")
    running = module is not None and module.Is_initialized() and not module.Is_finalized()
    ranks = module.COMM_WORLD.size if module is not None and running else 1
    local = int(variables.get("OMPI_COMM_WORLD_LOCAL_SIZE") or variables.get("MPI_LOCALNRANKS") or ranks)
    return {"ranks": ranks, "ranks_per_node": min(local, ranks), "nodes": -(-ranks // min(local, ranks))}


def threads() -> dict[str, str | None]:
    """The variables that set the number of threads of a rank and numba's threading layer."""
    names = ("NUMBA_THREADING_LAYER", "NUMBA_NUM_THREADS", "OMP_NUM_THREADS")
    return {name: os.environ.get(name) for name in names}


def cpu_model() -> str:
    """Name of the processor."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def f16c(variables: Mapping[str, str] = os.environ, listing: Path = Path("/proc/cpuinfo")) -> bool | None:
    """Whether numba compiles for a processor with float16 conversion (F16C of x86); None: not x86, or not known.

    numba compiles for the processor of this node unless its variables name another one.
    """
    generic = "" if variables.get("NUMBA_CPU_NAME", "").lower() == "generic" else None
    named = variables.get("NUMBA_CPU_FEATURES", generic)
    if named is not None:
        return "+f16c" in named.split(",") if platform.machine() in ("x86_64", "AMD64") else None
    lines = listing.read_text().splitlines() if listing.exists() else []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), None)
    return None if flags is None else "f16c" in flags


def mpi_compression(variables: Mapping[str, str] = os.environ) -> list[str]:
    """The variables that make MVAPICH compress messages of GPU memory, as NAME=value."""
    switches = ("ENABLE_COMPRESSION", "USE_COMPRESSION", "GPU_COMPRESSION")
    return sorted(
        f"{name}={value}"
        for name, value in variables.items()
        if name.startswith(("MV2_", "MVP_", "MPIR_CVAR_", "MPICH_")) and name.endswith(switches) and value in _ON
    )


def versions() -> dict[str, str | None]:
    """Version of each package that the library uses, from its metadata (no import); None if it is not installed."""
    return {name: version(name) for name in PACKAGES}


def version(package: str) -> str | None:
    """The installed version of a package, or None. CuPy's wheels have several names."""
    for name in _CUPY_NAMES if package == "cupy" else (package,):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def threading_layers() -> list[str] | str:
    """The threading layers that numba can load, best first, or why they are not known."""
    return _ask_child(_LAYERS_PROGRAM)


def gpus() -> list[dict[str, Any]] | str:
    """The GPUs that numba can use, or why they are not known. A child process asks: a broken driver may end it."""
    return _ask_child(_GPU_PROGRAM)


def _ask_child(program: str) -> Any:
    """What a program prints as JSON in a child process, or the last line of its error."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_CHILD_TIMEOUT_S} s"
    if child.returncode == 0:
        return json.loads(child.stdout.strip().splitlines()[-1])
    complaint = child.stderr.strip().splitlines()
    return complaint[-1] if complaint else f"the check ended with exit status {child.returncode}"


def cuda_aware() -> tuple[bool | None, str]:
    """Whether the loaded MPI library accepts device pointers, and how this was determined; None: not known."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None, "not checked: MPI is not running"
    query = "MPIX_Query_cuda_support"
    try:
        answer = getattr(ctypes.CDLL(module.__file__), query)()
    except (OSError, AttributeError):
        return None, f"not checked: the library has no {query}()"
    return bool(answer), f"{query}() of the loaded library answers {answer}"


def fault_tolerant(variables: Mapping[str, str] = os.environ) -> tuple[bool | None, str]:
    """Whether a job survives the loss of a rank (ULFM), and how this was determined; None: not known."""
    known = mpi()
    module = sys.modules.get("mpi4py.MPI")
    if known is None or module is None:
        return None, "not checked: MPI is not loaded"
    if known["library"] == "MPICH":
        return False, "MPICH has the functions, but no recovery behind them"
    if not hasattr(ctypes.CDLL(module.__file__), "MPIX_Comm_revoke"):
        return False, "the library has no MPIX_Comm_revoke()"
    if variables.get("OMPI_MCA_mpi_ft_enable") in ("1", "true"):
        return True, "the library has MPIX_Comm_revoke(), and OMPI_MCA_mpi_ft_enable is set"
    return False, "the library has MPIX_Comm_revoke(); mpirun --with-ft ulfm enables it"
