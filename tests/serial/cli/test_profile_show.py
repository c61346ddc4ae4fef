"""``profile show`` and ``profile describe``: tables, pictures, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from espresso_mpi.cli import profile_show
from espresso_mpi.errors import ConfigError
from espresso_mpi.planner.model.curve import ZERO, Curve, Sample
from espresso_mpi.planner.model.profile import Profile
from espresso_mpi.planner.workloads.clusters import TESTBEDS, Cluster, Link

SIZES = [1 << 10, 64 << 10, 1 << 20, 16 << 20]


def measured(alpha, beta, spread=0.04):
    return Curve.fit([Sample(n, alpha + beta * n, spread, 7) for n in SIZES])


@pytest.fixture
def profile(tmp_path):
    """A measured one, on disk."""
    made = Profile(
        nodes=2,
        ranks_per_node=3,
        codecs={("onebit", "cpu", way): measured(1e-5, 1e-9) for way in ("encode", "decode")},
        moves={("allreduce", "flat", False): measured(1e-4, 8e-9), ("alltoall", "inter", True): measured(1e-3, 4e-9)},
        copies={},
        check=measured(1e-6, 1e-10),
        call=25e-6,
        segment_bytes=1 << 20,
        environment={"cpu": "a processor", "date": "2026-01-01"},
        fingerprint={"nodes": 2, "ranks_per_node": 3, "mpi": "Open MPI 5.0"},
    )
    made.save(tmp_path / "profile.json")
    return made


def columns(table):
    _, header, lines = table
    return {name: [line[i] for line in lines] for i, name in enumerate(header)}


def test_tables(profile):
    cluster, codecs, moves, copies = profile_show.tables(profile)
    facts = {line[0]: line[1] for line in cluster[2]}
    assert facts["nodes"] == "2" and facts["ranks per node"] == "3" and facts["made by"] == "measuring"
    assert facts["mpi"] == "Open MPI 5.0" and facts["cpu"] == "a processor" and facts["segments"] == "1 MiB"
    assert facts["a sync costs"] == "25.0 µs" and facts["medians known to"] == "1.5%"

    shown = columns(codecs)
    assert (
        shown["codec"] == ["onebit", "", "", ""] * 2
        and shown["direction"][0] == "encode"
        and shown["direction"][4] == "decode"
    )
    assert shown["elements"][:4] == [f"{n:,}" for n in SIZES]
    assert [float(t) for t in shown["median ms"][:4]] == pytest.approx([0.01 + 1e-6 * n for n in SIZES], rel=5e-3)
    rates = [4 * n / (1e-5 + 1e-9 * n) / 1e9 for n in SIZES]
    assert [float(t) for t in shown["GB/s"][:4]] == pytest.approx(rates, rel=1e-2)
    assert shown["residual"][0] == "0.0%" and shown["spread"][0] == "4.0%" and shown["pieces"][0] == "1"

    shown = columns(moves)
    assert shown["operation"] == ["allreduce", "alltoall"]
    assert shown["level"] == ["flat", "inter, one rank per node"]
    assert shown["α µs"] == ["100.0", "1000.0"] and shown["β ns/byte"] == ["8", "4"]
    assert shown["largest"][0] == "134 ms (16 MiB)" and shown["MB/s there"][0] == "125"
    assert columns(copies)["what"] == ["check of a tensor"]


def test_what_is_off_shows():
    """A point 10 % above the others is 10 % above the curve."""
    rows = [Sample(1 << i, (1e-5 + 1e-9 * (1 << i)) * (1.1 if i == 14 else 1), 0.2, 3) for i in range(10, 20)]
    curve = Curve.fit(rows)
    made = Profile(1, 1, {("fp16", "cpu", "encode"): curve}, {}, {}, ZERO)
    off = [float(t.rstrip("%")) for t in columns(list(profile_show.tables(made))[1])["curve off by"]]
    assert int(np.argmin(off)) == 4 and -10 < off[4] < -5
    assert columns(list(profile_show.tables(made))[1])["residual"][0] == f"{curve.residual:.1%}"


def test_show_prints_and_draws(profile, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name, begins in (("p.png", b"\x89PNG"), ("p.svg", b"<?xml")):
        assert profile_show.main(tmp_path / "profile.json", tmp_path / name) == profile
        assert (tmp_path / name).read_bytes().startswith(begins)
    text = capsys.readouterr().out
    for part in ("onebit", "alltoall", "inter, one rank per node", "check of a tensor", "2026-01-01"):
        assert part in text


def test_every_panel_has_its_curves(profile):
    panels = {title: [name for name, _ in lines] for title, _, lines in profile_show._panels(profile)}
    assert panels == {
        "encode": ["onebit on cpu"],
        "decode": ["onebit on cpu"],
        "flat": ["allreduce"],
        "inter, one rank per node": ["alltoall"],
        "copies and checks": ["check"],
    }
    assert profile_show._panels(Profile(1, 1, {}, {}, {}, ZERO)) == [("check", "bytes", [("check", ZERO)])]


def test_describe_then_show(tmp_path, capsys):
    output = tmp_path / "p.json"
    assert profile_show.describe_main("pcie-25g", output) == TESTBEDS["pcie-25g"].profile() == Profile.load(output)
    profile_show.main(output)
    text = capsys.readouterr().out
    assert "a description" in text and "Assumed: operations reach" in text and "copy to_gpu" in text

    mine = Cluster("mine", 2, 1, Link(0, 0), Link.gbit(1, 1e-5), text="a guess")
    mine.save(tmp_path / "mine.json")
    assert profile_show.describe_main(tmp_path / "mine.json", output) == mine.profile()
    profile_show.main(output)
    assert "a guess" in capsys.readouterr().out


def test_what_is_refused(profile, tmp_path):
    good = tmp_path / "profile.json"
    (tmp_path / "bad.json").write_text("{}")
    for path, plot, says in (
        (tmp_path / "none.json", None, "cannot be read"),
        (tmp_path, None, "cannot be read"),
        (tmp_path / "bad.json", None, "kind"),
        (good, tmp_path / "none" / "p.png", "does not exist"),
        (good, tmp_path, "directory"),
    ):
        with pytest.raises(ConfigError, match=says):
            profile_show.main(path, plot)
    for description, output, says in (
        ("infiniband", tmp_path / "p.json", "no such file.*nvlink-100g, pcie-25g"),
        (tmp_path / "bad.json", tmp_path / "p.json", "kind"),
        ("pcie-25g", tmp_path / "none" / "p.json", "does not exist"),
    ):
        with pytest.raises(ConfigError, match=says):
            profile_show.describe_main(description, output)


def test_only_png_and_svg_are_drawn(profile, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"'\.pdf'; expected \.png or \.svg"):
        profile_show.main(tmp_path / "profile.json", tmp_path / "p.pdf")
