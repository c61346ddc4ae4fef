"""What ranks are told about calls that do not go together."""

from espresso_mpi.verdicts import Content, conflict_error


def test_equal_tensors_by_different_plans():
    tensors = (("w", "float32 (3,)", "cpu"),)
    contents = {0: Content(("push", "w"), 0.0, tensors, "aa"), 2: Content(("push", "w"), 0.0, tensors, "bb")}
    assert "rank 0 and rank 2 bring the same tensors, and send them by different plans" in str(
        conflict_error(contents, "rank {}".format)
    )
