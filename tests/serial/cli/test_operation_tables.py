"""`espresso-mpi explain --program`: the example of the documentation, and what is refused."""

from pathlib import Path

import pytest

from espresso_mpi.cli import tables
from espresso_mpi.compressors import get, names
from espresso_mpi.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs" / "operation-tables.md"


def stripped(text):
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_the_page_shows_what_is_printed(capsys):
    tables.main("flat-alltoall", "onebit", 4096, nodes=1, ranks=2, rank=0)
    printed = stripped(capsys.readouterr().out)
    shown = PAGE.read_text().partition("```text\n")[2].partition("```")[0]
    assert stripped(shown) == printed


@pytest.mark.parametrize("name", names())
def test_every_method_has_kernels(name):
    method = get(name)
    wanted = {
        "encoder": True, "decoder": True, "finalizer": method.finalizes, "updater": method.updates,
        "summariser": method.summary(1000) is not None,
    }  # fmt: skip
    assert {kernel: getattr(method, kernel)(1000) is not None for kernel in wanted} == wanted


def test_the_second_rank_of_a_node_takes_from_the_first(capsys):
    tables.main("hierarchical-allgather", "dgc:clip=1.0", 5000, nodes=2, ranks=2, rank=3)
    printed = capsys.readouterr().out
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


def test_summaries_are_agreed_on_and_payloads_summed(capsys):
    tables.main("flat-linear", "powersgd:rank=2", 4096, nodes=1, ranks=2, rank=0)
    printed = capsys.readouterr().out
    assert "buffer 0 [1024:1536] + the same of the other slots" in printed
    assert "buffer 0 [512:1024] -> own slot" in printed
    words = [line.split()[1] for line in stripped(printed)[3:]]
    steps = [word for word in words if word not in ("mark", "yield")]
    summed = ["show", "meet", "sum"]
    assert steps == ["summarise", *summed, "encode", *summed, "update", "decode", "divide"]


def test_what_python_does_is_said(capsys):
    tables.main("encode@cpu/reduce@flat/broadcast@flat/decode@cpu", "randomk", 1000, nodes=1, ranks=2, rank=0)
    printed = capsys.readouterr().out
    assert "reduce of payloads" in printed and "broadcast of payloads" in printed


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
