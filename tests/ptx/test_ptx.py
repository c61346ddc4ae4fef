"""Every CUDA kernel compiles for old and new kinds of GPU, and to the arithmetic that is meant.

With ``--quick``, only one kernel of each module is compiled for the old kind; spills of the others are not seen.

Needs a compiler (the ``ptx`` extra) and no GPU. CUDA 12 is the last one that compiles for sm_70.
Without one the tests are skipped, or fail if ESPRESSO_REQUIRE_PTX=1, so that ``make test-ptx`` cannot pass by skipping.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import re
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from numba import config, cuda
from numba.cuda.cudadrv import nvvm

from espresso_mpi.compressors.kernels import cuda as kernels
from espresso_mpi.compressors.kernels.cuda import gpu, launching

ARCHITECTURES = ((7, 0), (9, 0))
"""The oldest and the newest: what both compile, those between do."""
REQUIRED = os.environ.get("ESPRESSO_REQUIRE_PTX") == "1"


def _kernels():
    """All kernels of the package: those of the compressors, the sums of the collectives, and those of optimizers."""
    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{module.name}")
    importlib.import_module("espresso_mpi.collectives.data.cuda_sums")
    importlib.import_module("espresso_mpi.optim.cuda_updates")
    return gpu.KERNELS


KERNELS = {kernel.name: kernel for kernel in _kernels()}


def _unavailable() -> str | None:
    """Why the kernels cannot be compiled here, if so."""
    if config.ENABLE_CUDASIM:
        return "NUMBA_ENABLE_CUDASIM is set"
    try:
        cuda.compile_ptx(lambda x: None, "void(float32[::1])", cc=ARCHITECTURES[0])
    except Exception as error:
        return f"no compiler for sm_70; pip install 'espresso-mpi[ptx]' ({' '.join(str(error).split())[:200]})"
    return None


@pytest.fixture(scope="session", autouse=True)
def compiler():
    """Skip or fail where there is no compiler; where there is no GPU, do without asking it what it is."""
    reason = _unavailable()
    if reason:
        pytest.fail(reason) if REQUIRED else pytest.skip(reason)
    from numba.cuda import api, dispatcher

    device = SimpleNamespace(compute_capability=ARCHITECTURES[0])
    patch = pytest.MonkeyPatch()
    for module in (api, dispatcher):
        patch.setattr(module, "get_current_device", lambda: device)
    yield
    patch.undo()


@functools.cache
def _llvm(name: str, architecture: tuple[int, int] = ARCHITECTURES[0]) -> tuple[list[str], dict[str, object]]:
    """What numba hands to NVIDIA's compiler: its texts and options. To write them takes most of the time."""
    kernel, handed = KERNELS[name], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvvm, "compile_ir", lambda texts, **options: handed.append((texts, options)) or b"")
        cuda.compile_ptx(kernel.function, kernel.signature, cc=architecture)
    return handed[0]


@functools.cache
def _ptx(name: str, architecture: tuple[int, int], fuse: bool = True) -> str:
    """``fuse``: whether the compiler may turn a product and a sum into one operation, as it does by default."""
    texts, options = _llvm(name)
    options = {**options, "arch": f"compute_{architecture[0]}{architecture[1]}", **({} if fuse else {"fma": False})}
    return nvvm.compile_ir(texts, **options).decode()


def _fused(name: str, architecture: tuple[int, int], fuse: bool = True) -> int:
    return len(re.findall(r"\b(?:fma|mad\.rn\.f)", _ptx(name, architecture, fuse)))


def _instructions(name: str, architecture: tuple[int, int]) -> set[str]:
    return set(re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][\w.:]*)\s", _ptx(name, architecture), re.MULTILINE))


ONE_OF_EACH = {name.partition(".")[0]: name for name in KERNELS}
"""A kernel of each module."""


def compiled():
    """Every kernel for both architectures; with ``--quick``, for the older one only one of each module."""
    for name in KERNELS:
        for cc in ARCHITECTURES:
            once = cc == ARCHITECTURES[0] and name not in ONE_OF_EACH.values()
            yield pytest.param(name, cc, marks=pytest.mark.thorough if once else (), id=f"{name}-sm_{cc[0]}{cc[1]}")


def test_names_are_unique():
    assert len(KERNELS) == len(_kernels()) > 20


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_numba_writes_the_same_instructions_for_every_architecture(name):
    """So each kernel is translated once, and compiled for each architecture."""
    (oldest, _), (newest, options) = (_llvm(name, architecture) for architecture in ARCHITECTURES)
    assert options["arch"] == "compute_90" and len(oldest) == len(newest)
    instruction = re.compile(r"^\s+(?:%\S+ = )?([a-z]\w*)|@((?:llvm|__nv)[\w.]+)", re.MULTILINE)
    for one, other in zip(oldest, newest):
        assert instruction.findall(one) == instruction.findall(other) != []


@pytest.mark.parametrize(("name", "architecture"), [*compiled()])
def test_compiles_to_the_arithmetic_it_is_meant_to_do(name, architecture):
    text, used = _ptx(name, architecture), _instructions(name, architecture)
    assert text.count(".visible .entry") == 1
    assert f".target sm_{architecture[0]}{architecture[1]}" in text
    assert {i for i in used if "ftz" in i or "approx" in i or "full" in i} == set(), "not IEEE arithmetic"
    assert ".local" not in text, "an array in local memory, which is slow"
    assert not any(i.startswith("call") for i in used), "a device function that was not inlined"
    if "float64" not in KERNELS[name].signature:
        assert {i for i in used if ".f64" in i} == set(), "a float64 slipped in"
    if _fused(name, architecture) and not KERNELS[name].may_fuse:
        meant = _fused(name, architecture, fuse=False)
        assert _fused(name, architecture) == meant, "a product was fused with a sum that the source does not fuse"


@pytest.mark.parametrize("name", KERNELS)
def test_arguments_are_packed_as_the_kernel_takes_them(name):
    """The driver gets them in one buffer, each at a multiple of its size."""
    taken = re.findall(r"\.param \.[a-z](\d+) ", _ptx(name, ARCHITECTURES[1]))
    assert [8 * struct.calcsize(one) for one in launching.layout(KERNELS[name].signature)] == list(map(int, taken))


def test_a_sum_that_is_fused_unasked_would_be_found():
    def kernel(x):
        x[0] = x[1] * x[2] + x[3]

    KERNELS["fused"] = SimpleNamespace(function=kernel, signature="void(float32[::1])")
    try:
        assert (_fused("fused", (9, 0)), _fused("fused", (9, 0), fuse=False)) == (1, 0)
    finally:
        del KERNELS["fused"]


@pytest.mark.parametrize(
    ("name", "explicit"),
    [
        ("blocks.encode[keep=False][rule=nearest][per=1]", "fma.rn.f32"),
        ("blocks.encode[keep=True][rule=stochastic][per=1]", "fma.rn.f32"),
        ("blocks.decode[add=True][float8=False][per=1]", "fma.rn.f32"),
        ("blocks.encode[keep=False][rule=nearest][per=1]", "div.rn.f32"),
        ("signs.encode[keep=True][two=False][staged=True]", "div.rn.f32"),
        ("signs.encode[keep=True][two=False][staged=True]", "vote.sync.ballot.b32"),
        ("topk.count_digits[add=True]", "atom.shared.add.u32"),
    ],
)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
def test_uses(name, explicit, architecture):
    assert explicit in _instructions(name, architecture)


def _ptxas() -> Path | None:
    """NVIDIA's assembler, which comes with the compiler of CUDA 12's packages."""
    try:
        import nvidia.cuda_nvcc as nvcc
    except ImportError:
        return None
    found = Path(nvcc.__path__[0]) / "bin" / "ptxas"
    return found if found.exists() else None


@pytest.mark.parametrize(("name", "architecture"), [*compiled()])
def test_assembles_without_spills(name, architecture, tmp_path):
    """The assembler accepts the PTX, and three blocks of each kernel fit a multiprocessor's 65536 registers."""
    ptxas = _ptxas()
    if ptxas is None:
        missing = "no ptxas; pip install 'espresso-mpi[ptx]'"
        pytest.fail(missing) if REQUIRED else pytest.skip(missing)
    source, arch = tmp_path / "kernel.ptx", f"-arch=sm_{architecture[0]}{architecture[1]}"
    source.write_text(_ptx(name, architecture))
    command = [ptxas, "-v", arch, source, "-o", tmp_path / "kernel.cubin"]
    report = subprocess.run(command, capture_output=True, text=True, check=False)
    assert report.returncode == 0, report.stderr
    assert set(re.findall(r"(\d+) bytes spill", report.stderr)) <= {"0"}, report.stderr
    (registers,) = re.findall(r"Used (\d+) registers", report.stderr)
    assert int(registers) <= 65536 // (3 * gpu.THREADS)
