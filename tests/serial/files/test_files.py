"""Files that are replaced as a whole."""

import os

import pytest

from espresso_mpi.files import schema
from espresso_mpi.files.atomic import replacing
from espresso_mpi.tracing import trace_file


def test_what_lies_where_a_temporary_file_might_be_is_left_alone(tmp_path):
    (tmp_path / "victim").write_text("precious")
    for name in (f"plan.json.{os.getpid()}.tmp", f".step.json.{os.getpid()}.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "victim")
    before = sorted(os.listdir(tmp_path))
    schema.write(tmp_path / "plan.json", {"a": 1})
    trace_file.refuse_unwritable(tmp_path / "step.json")
    trace_file.write(tmp_path / "step.json", {"traceEvents": []})
    assert (tmp_path / "victim").read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "plan.json", "step.json"])


def test_an_error_leaves_the_former_file(tmp_path):
    path = tmp_path / "x"
    path.write_text("former")
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines(["half of the new", 1])
    assert (path.read_text(), os.listdir(tmp_path)) == ("former", ["x"])
    (tmp_path / "plain").touch()
    with replacing(path) as file:
        file.write("new")
    assert path.read_text() == "new"
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
