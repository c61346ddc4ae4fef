"""Compressors of other packages, offered by entry points: found late, listed, tested by the laws, refused in words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]

HALF = """
from dataclasses import dataclass
import numpy as np
from espresso_mpi.compressors import Compressor


@dataclass(frozen=True)
class Half(Compressor):
    scale: float = 1.0
    name = "plug-half"

    def nbytes(self, n):
        return 2 * n

    def _encode_cpu(self, x, payload, residual, context):
        value = x if residual is None else x + residual
        codes = payload.view(np.float16)
        with np.errstate(invalid="ignore", over="ignore"):
            codes[...] = np.clip(np.nan_to_num(value * np.float32(self.scale)), -60000, 60000)
        if residual is not None:
            residual[...] = value - codes.astype(np.float32) / np.float32(self.scale)

    def _decode_cpu(self, payload, out, add, context):
        values = payload.view(np.float16).astype(np.float32) / np.float32(self.scale)
        out[...] = values + out if add else values
"""


@pytest.fixture
def site(tmp_path):
    """A folder of installed packages, and a function that installs one there."""

    def install(package: str, code: str, **entries: str) -> Path:
        module = package.replace("-", "_")
        info = tmp_path / f"{module}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
        lines = [f"{name.replace('_', '-')} = {value}" for name, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[espresso_mpi.compressors]", *lines, ""]))
        (tmp_path / f"{module}.py").write_text(code)
        return tmp_path

    return install


def run(folder: Path, *command: str) -> str:
    paths = [str(folder), str(TESTS.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, *command], cwd=TESTS, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_package_offers_a_compressor(site):
    run(site("plug-in", HALF, plug_half="plug_in:Half"), "-c", _FOUND)


_FOUND = """
import sys
import numpy as np
from mpi4py import MPI
from espresso_mpi import Session
from espresso_mpi.bench import compressors as bench
from espresso_mpi.compressors import get, names, plugins, read_specs

get("fp16"), read_specs("none,int8,topk:ratio=0.1"), names(installed=False)
assert plugins.installed.cache_info().misses == 0 and "plug_in" not in sys.modules, "looked at before it was needed"

assert get("plug-half:scale=2.0").scale == 2.0
assert "plug-half" in names() and "plug-half" in bench._specs("all") and "plug-half" not in names(installed=False)
x = np.linspace(-1, 1, 100_000, dtype=np.float32)
with Session(MPI.COMM_WORLD, compressor="plug-half") as session:
    mean = x.copy()
    session.sync({"w": mean})
assert np.allclose(mean, x, atol=1e-3)
"""


def test_the_laws_find_it(site):
    folder = site("plug-in", HALF, plug_half="plug_in:Half")
    laws = str(TESTS / "serial" / "compressors" / "test_laws.py")
    told = run(
        folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", laws, "-k", "plug-half and (reads_back or consistent)"
    )
    assert "2 passed" in told


BROKEN = "raise RuntimeError('no licence')"


@pytest.mark.parametrize(
    "code, value, words",
    [
        (BROKEN, "plug_in:Half", "RuntimeError: no licence"),
        (HALF, "plug_in:Hafl", "AttributeError"),
        (HALF, "elsewhere:Half", "ModuleNotFoundError"),
        (HALF.replace('"plug-half"', '"other"'), "plug_in:Half", "has name='other'; expected the name of the entry"),
        (HALF.replace("Half(Compressor)", "Half"), "plug_in:Half", "it is no subclass of Compressor"),
    ],
)
def test_a_broken_one_is_an_error_when_it_is_asked_for(site, code, value, words):
    folder = site("plug-in", code, plug_half=value)
    told = run(folder, "-c", _BROKEN)
    assert words in told and f"package plug-in 1.5, entry point plug-half = {value}" in told
    assert told.count("left out of the list of compressors") == 1


_BROKEN = """
from espresso_mpi.compressors import get, names
from espresso_mpi.errors import ConfigError

assert "fp16" in names() and "plug-half" not in names() and get("fp16")
try:
    get("plug-half")
except ConfigError as error:
    print(error)
else:
    raise AssertionError("nothing is wrong")
"""


@pytest.mark.parametrize("other", ["built in", "installed"])
def test_a_name_that_is_taken_is_refused_with_both_origins(site, other):
    folder = site("plug-in", HALF, **({"fp16": "plug_in:Half"} if other == "built in" else {"half": "plug_in:Half"}))
    if other == "installed":
        site("plug-two", HALF, half="plug_two:Half")
    told = run(folder, "-c", _TAKEN)
    first = "espresso_mpi.compressors.fp16, which is built in" if other == "built in" else "package plug-two 1.5"
    assert told.count(first) == told.count("package plug-in 1.5") == 2


_TAKEN = """
from espresso_mpi.compressors import get, names
from espresso_mpi.errors import ConfigError

assert type(get("fp16")).__module__ == "espresso_mpi.compressors.fp16", "a built-in one is what it was"
for ask in (names, lambda: get("plug-half")):
    try:
        ask()
    except ConfigError as error:
        print(error)
    else:
        raise AssertionError("both are taken")
"""
