"""What ranks are told about calls that do not go together."""

import pytest

from espresso_mpi.engine.diagnostics import Content, agree_on_options, conflict_error
from espresso_mpi.errors import MismatchError
from espresso_mpi.options import Options
from espresso_mpi.types import MadeFor, Plan, Strategy


def test_equal_tensors_by_different_plans():
    tensors = (("w", "float32 (3,)", "cpu"),)
    contents = {0: Content(("push", "w"), 0.0, tensors, "aa"), 2: Content(("push", "w"), 0.0, tensors, "bb")}
    assert "rank 0 and rank 2 bring the same tensors, and send them by different plans" in str(
        conflict_error(contents, "rank {}".format)
    )


def test_plans_of_thousands_of_tensors_are_told_apart_in_a_line():
    def note(last):
        tensors = {f"tensor {n}": ((n + 1,), "float32") for n in range(2000)} | {"last": ((last,), "float32")}
        plan = Plan(default=Strategy("none", "flat"), made_for=MadeFor(tensors, 2, 4))
        return "host", {"problem": None, "options": Options(plan=plan).described()}

    agree_on_options([note(3), note(3)])
    with pytest.raises(MismatchError, match=r"about plan: rank 0 .* made for 2001 tensors .* rank 1 .*; pass the same"):
        agree_on_options([note(3), note(4)])
    assert len(note(3)[1]["options"]["plan"]) < 200
