"""`espresso-mpi explain --program`: the example of the documentation, and what is refused."""

from pathlib import Path

import pytest

from espresso_mpi.cli import tables
from espresso_mpi.compressors import names
from espresso_mpi.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs" / "operation-tables.md"


def stripped(text):
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_the_page_shows_what_is_printed(capsys):
    tables.main("flat-alltoall", "onebit", 4096, nodes=1, ranks=2, rank=0)
    printed = stripped(capsys.readouterr().out)
    shown = PAGE.read_text().partition("```text\n")[2].partition("```")[0]
    assert stripped(shown) == printed


def test_the_page_lists_the_methods_that_have_kernels():
    from espresso_mpi.compressors import get

    listed = next(line for line in PAGE.read_text().splitlines() if line.endswith("| kernels in the table |"))
    have = {name for name in names() if get(name).encoder(1000) is not None}
    assert {word.strip("`, ") for word in listed.split("|")[1].split()} == have


def test_the_second_rank_of_a_node_takes_from_the_first(capsys):
    tables.main("hierarchical-allgather", "dgc:clip=1.0", 5000, nodes=2, ranks=2, rank=3)
    printed = capsys.readouterr().out
    assert "encode dgc:clip=1.0 of tensor 0" in printed
    assert "rank 1 -> buffer 1" in printed
    assert "of the other rows, divided" in printed


def test_a_dense_tensor_between_nodes(capsys):
    tables.main("hierarchical", "none", 20_000, nodes=2, ranks=2, rank=3)
    printed = capsys.readouterr().out
    assert "rank 1 -> buffer 0" in printed and "bytes of tensor 0 [60160:80000] -> rank 1" in printed
    assert "tensor 0 [15040:20000] + the other rows of buffer 0 [0:39680], divided" in printed


def test_a_vote_is_taken_after_the_division(capsys):
    tables.main("flat-allgather", "signsgd", 1000, nodes=1, ranks=3, rank=0)
    printed = stripped(capsys.readouterr().out)
    at = next(number for number, line in enumerate(printed) if "finalized" in line)
    assert "divide" in printed[at - 1] and "python" not in "".join(printed)


def test_what_has_no_table_says_why(capsys):
    tables.main("flat-linear", "randomk", 1000, nodes=1, ranks=2, rank=0)
    assert "Python: allreduce of payloads" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rank": 2}, "--rank 2 of 1 x 2 ranks; expected a number from 0 to 1"),
        ({"elements": 0}, "--elements 0"),
        ({"route": "flat-linear"}, "cannot be summed"),
        ({"route": "flat-alltoall", "compressor": "none"}, "needs a compressor"),
        ({"compressor": "twobit"}, "twobit"),
    ],
)
def test_bad_arguments_are_named(change, text):
    given = {"route": "flat-alltoall", "compressor": "onebit", "elements": 100, "nodes": 1, "ranks": 2, "rank": 0}
    with pytest.raises(ConfigError, match=text):
        tables.main(**{**given, **change})
