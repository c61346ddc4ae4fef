"""``bench fidelity``: which compressors its levels take, and what it measures, on a run of a few steps."""

from __future__ import annotations

import json

import pytest

from espresso_mpi.errors import ConfigError

pytest.importorskip("torch")

from espresso_mpi.bench import fidelity


def test_levels_take_the_fewest_bytes_that_they_allow(monkeypatch, tmp_path):
    monkeypatch.setattr(fidelity, "RATES", {("lstm", "adamw"): 6e-3})
    rows = {r.way: r for r in fidelity.main(compressors="int8,onebit", seeds="3", steps=8, json=tmp_path / "rows.json")}
    assert list(rows) == ["int8", "onebit", "safe", "balanced", "fast"]
    assert rows["int8"].error < 0.05 < rows["onebit"].error
    assert rows["safe"].bits == rows["balanced"].bits == rows["int8"].bits > 8
    assert rows["safe"].loss == rows["balanced"].loss == rows["int8"].loss, "the same run again"
    assert rows["fast"].bits == rows["onebit"].bits < 2 and rows["fast"].loss == rows["onebit"].loss
    assert abs(rows["int8"].gap) < 0.01
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [row["way"] for row in written["rows"]] == list(rows)


@pytest.mark.parametrize("wrong", [{"seeds": "one"}, {"steps": 3}, {"compressors": "inta8"}])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(ConfigError):
        fidelity.main(**wrong)
