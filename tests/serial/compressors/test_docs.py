"""docs/compressors.md agrees with the methods, and the examples of docs/add-compressor.md obey the laws."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import fields
from pathlib import Path

import laws
import pytest
from doc_blocks import blocks

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


EXAMPLES = ("upper", "upper-summed", "upper-fast")


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """The methods that the page shows, registered as a file in the folder would be."""
    code = [block.text for block in blocks("docs/add-compressor.md") if "@register" in block.text]
    path = tmp_path_factory.mktemp("docs") / "upper.py"
    path.write_text("\n\n".join(code))
    spec = importlib.util.spec_from_file_location("upper", path)
    sys.modules["upper"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield
    for name in EXAMPLES:
        unregister(name)
    del sys.modules["upper"]


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_obey_every_law(examples, name, law):
    law(get(name))
