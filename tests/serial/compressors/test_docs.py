"""docs/compressors.md agrees with the methods, and the example of docs/add-compressor.md obeys the laws."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import fields
from pathlib import Path

import laws
import pytest

from espresso_mpi.compressors import get, names, unregister

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "compressors.md").read_text()
N = 1 << 20
TABLE_LINES = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in TEXT.splitlines()
    if line.startswith("| `")
]
ROWS = {name.strip("`"): cells for name, *cells in TABLE_LINES if len(cells) == 8}
PARAMETERS = {name.strip("`"): cells[0] for name, *cells in TABLE_LINES if len(cells) == 1}


def test_every_method_has_its_lines_and_nothing_else_has():
    assert set(ROWS) == set(names(installed=False)) == set(PARAMETERS)
    assert all(all((what, when, source)) for what, _, _, _, _, _, when, source in ROWS.values())


def agrees(said, number):
    return number is None if said == "–" else float(said) == pytest.approx(number, rel=0.01)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_and_their_defaults_are_those_of_the_method(name):
    said = re.findall(r"(?:^|<br>)`(\w+)=([^`]*)`", PARAMETERS[name])
    assert said == [(field.name, str(field.default)) for field in fields(get(name))]


@pytest.mark.parametrize("name", ROWS)
def test_numbers_are_those_of_the_method(name):
    method = get(name).at(None)
    _, bits, error, delta, omega, linear, _, _ = ROWS[name]
    assert agrees(error, method.gaussian_error(N))
    assert agrees(delta, method.contraction(N) or None)
    assert agrees(omega, method.variance(N))
    assert linear == ("common" if method.common else "yes" if method.linear else "")
    on_the_wire = method.nbytes(N)
    if method.common:
        summary = method.summary(N)
        on_the_wire += (4 * summary.size if summary else 0) - method.header(N)
    assert agrees(bits, 8 * on_the_wire / N)


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The method that the page shows, registered as a file in the folder would be."""
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "add-compressor.md").read_text(), re.DOTALL)
    path = tmp_path_factory.mktemp("docs") / "floor2.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("floor2", path)
    sys.modules["floor2"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield "floor2"
    unregister("floor2")
    del sys.modules["floor2"]


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_the_example_obeys_every_law(example, law):
    law(get(example))
