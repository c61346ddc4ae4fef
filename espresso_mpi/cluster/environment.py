"""Facts about this node and job: what benchmarks store, and what the doctor judges.

Nothing here communicates, so any rank may call it at any time.
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
    """This process's surroundings as plain JSON: MPI, ranks, processor, memory, threads, versions, date.

    MPI is described if this process has loaded it; nothing is loaded for it.
    """
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "mpi": mpi(),
        "job": job(),
        "lab": os.environ.get("ESPRESSO_LAB"),
        "host": platform.node(),
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
    """Hosts and ranks of this job, as far as this rank can tell without asking the others.

    The hosts follow from the ranks of this one and so are right for even jobs only.
    """
    module = sys.modules.get("mpi4py.MPI")
    running = module is not None and module.Is_initialized() and not module.Is_finalized()
    ranks = module.COMM_WORLD.size if module is not None and running else 1
    local = int(variables.get("OMPI_COMM_WORLD_LOCAL_SIZE") or variables.get("MPI_LOCALNRANKS") or ranks)
    return {"ranks": ranks, "ranks_per_host": min(local, ranks), "hosts": -(-ranks // min(local, ranks))}


def threads() -> dict[str, str | None]:
    """The variables that decide how many threads a rank computes with, and on which threading layer."""
    names = ("NUMBA_THREADING_LAYER", "NUMBA_NUM_THREADS", "OMP_NUM_THREADS")
    return {name: os.environ.get(name) for name in names}


def cpu_model() -> str:
    """The processor's name."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def f16c(variables: Mapping[str, str] = os.environ, listing: Path = Path("/proc/cpuinfo")) -> bool | None:
    """Whether numba compiles for a processor that converts float16 (x86's F16C); None: not x86, or not known.

    numba takes the processor that it finds, unless its variables name another one.
    """
    generic = "" if variables.get("NUMBA_CPU_NAME", "").lower() == "generic" else None
    named = variables.get("NUMBA_CPU_FEATURES", generic)
    if named is not None:
        return "+f16c" in named.split(",") if platform.machine() in ("x86_64", "AMD64") else None
    lines = listing.read_text().splitlines() if listing.exists() else []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), None)
    return None if flags is None else "f16c" in flags


def mpi_compression(variables: Mapping[str, str] = os.environ) -> list[str]:
    """The settings by which MVAPICH compresses messages of GPU memory on their way, as NAME=value."""
    switches = ("ENABLE_COMPRESSION", "USE_COMPRESSION", "GPU_COMPRESSION")
    return sorted(
        f"{name}={value}"
        for name, value in variables.items()
        if name.startswith(("MV2_", "MVP_", "MPIR_CVAR_", "MPICH_")) and name.endswith(switches) and value in _ON
    )


def versions() -> dict[str, str | None]:
    """Version of each package that matters here, from its metadata (none is imported); None if absent."""
    return {name: version(name) for name in PACKAGES}


def version(package: str) -> str | None:
    """The installed version of `package`, or None; CuPy's wheels are looked up under all their names."""
    for name in _CUPY_NAMES if package == "cupy" else (package,):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def threading_layers() -> list[str] | str:
    """The threading layers that numba can load here, best first, or why that is unknown."""
    return _ask_child(_LAYERS_PROGRAM)


def gpus() -> list[dict[str, Any]] | str:
    """The GPUs that numba can use, or why that is unknown. A broken driver ends only the child asked."""
    return _ask_child(_GPU_PROGRAM)


def _ask_child(program: str) -> Any:
    """What `program` prints as JSON in a process of its own, or the last line of its complaint."""
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
    """Whether the loaded MPI library takes device pointers, and how that was found out; None: not known."""
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
    """Whether a job survives the loss of a rank (ULFM), and how that was found out; None: not known."""
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
    return False, "the library has MPIX_Comm_revoke(); switched on by mpirun --with-ft ulfm"
