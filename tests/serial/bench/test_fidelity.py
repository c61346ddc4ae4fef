"""``bench fidelity``: which compressors its levels take, and what it measures, on a run of a few steps."""

from __future__ import annotations

import json

import pytest

from espresso_mpi.errors import ConfigError

pytest.importorskip("torch")

from espresso_mpi.bench import fidelity


def test_levels_take_the_fewest_bytes_that_they_allow(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(fidelity, "RATES", {("lstm", "adamw"): 6e-3})
    rows = {r.way: r for r in fidelity.main(compressors="int8,onebit", seeds="3", steps=8, json=tmp_path / "rows.json")}
    assert list(rows) == ["int8", "onebit", "safe", "balanced", "fast"]
    assert rows["int8"].error < 0.05 < rows["onebit"].error
    assert rows["safe"].bits == rows["balanced"].bits == rows["int8"].bits > 8
    assert rows["safe"].loss == rows["balanced"].loss == rows["int8"].loss, "the same run again"
    assert rows["fast"].bits == rows["onebit"].bits < 2 and rows["fast"].loss == rows["onebit"].loss
    assert abs(rows["int8"].gap) < 0.01
    assert 0 < rows["onebit"].aligned < 0.9 and rows["int8"].aligned == pytest.approx(1, abs=1e-3)
    assert rows["int8"].early == pytest.approx(1, abs=0.1) and rows["onebit"].early != rows["int8"].early
    said = capsys.readouterr().out
    assert "Rank correlation with the loss against fp32, adamw, 2 runs: error 1.00, cosine 1.00" in said
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [row["way"] for row in written["rows"]] == list(rows)


@pytest.mark.parametrize("wrong", [{"seeds": "one"}, {"steps": 3}, {"compressors": "inta8"}])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(ConfigError):
        fidelity.main(**wrong)
