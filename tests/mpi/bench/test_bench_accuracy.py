"""``bench accuracy`` with a tiny model: DDP trains as we do, a stopped call goes on, step times price its curves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from espresso_mpi.bench import accuracy
from espresso_mpi.errors import ConfigError

pytest.importorskip("torch")

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread")]

TINY = {"steps": 4, "batch": 2, "width": 64, "layers": 1, "eval_every": 2, "seeds": "0"}
"""Some of its tensors are large enough to be compressed."""


@pytest.fixture
def path(world, tmp_path):
    """A file in rank 0's temporary folder, on every rank."""
    return Path(world.bcast(str(tmp_path))) / "curves.json"


def test_a_stopped_call_goes_on_and_its_curves_are_priced(world, path):
    first = accuracy.main(**TINY, ways="gloo:none,gradsync:int8", json=path, comm=world)
    if world.rank == 0:
        marked = json.loads(path.read_text())
        marked["rows"][1]["loss"] = 1.25
        path.write_text(json.dumps(marked))
    world.Barrier()
    partly = "gradsync+dense_steps=2+dense=head*|*embedding*:int8"
    ways = f"gloo:none,gradsync:none,gradsync:int8,gloo:fp16,diloco,muloco,{partly}"
    second = accuracy.main(**TINY, ways=ways, json=path, comm=world)
    runs = {row["way"]: row for row in second["rows"]}
    assert second["rows"][0] == first["rows"][0]
    assert runs["gradsync:int8"]["loss"] == 1.25
    assert list(runs) == ["gloo:none", "gradsync:int8", "gradsync:none", "gloo:fp16", "diloco", "muloco", partly]
    assert all(row["replicas_identical"] for row in runs.values())
    assert [point["step"] for point in runs["gloo:none"]["curve"]] == [0, 2, 4]
    assert runs["gloo:none"]["loss"] == pytest.approx(runs["gradsync:none"]["loss"], rel=1e-5)
    dense = 2 * (world.size - 1) / world.size * 4 * second["settings"]["parameters"]
    assert runs["gloo:none"]["sent_by_step"] == (round(dense),) * 4
    assert runs["gloo:fp16"]["sent_by_step"] == (round(dense / 2),) * 4
    assert sum(runs["gradsync:none"]["sent_by_step"]) == pytest.approx(4 * dense, rel=0.01)
    early, late = (runs[partly]["sent_by_step"][step] for step in (1, 3))
    assert early == pytest.approx(dense, rel=0.05) and runs["gradsync:int8"]["sent_by_step"][3] < late < early
    assert runs["diloco"]["sent_by_step"][1:3] == runs["muloco"]["sent_by_step"][1:3] == (0, 0)
    assert runs["muloco"]["loss"] < runs["diloco"]["loss"] - 0.01  # by the steps of another local optimizer
    prices = path.with_name("prices.json")
    priced = accuracy.main(curves=path, ways="gloo:none,diloco", repeats=20, json=prices, comm=world)
    rows = {row["way"]: row for row in priced["rows"]}
    assert list(rows) == ["gloo:none", "diloco"]
    assert [p["loss"] for p in rows["diloco"]["curve"]] == [p["loss"] for p in runs["diloco"]["curve"]]
    step = next(time["seconds"] for time in priced["step_times"] if time["way"] == "gloo:none")
    assert [p["seconds"] for p in rows["gloo:none"]["curve"]] == pytest.approx([0, 2 * step, 4 * step])
    again = accuracy.main(curves=path, times=prices, comm=world)
    assert again["rows"] == priced["rows"] and again["environment"] == priced["environment"]
    for other, words in ((path, "expected a file that bench accuracy --curves"), (None, "--times: expected --curves")):
        with pytest.raises(ConfigError, match=words):
            accuracy.main(curves=other, times=other or prices, comm=world)
    with pytest.raises(ConfigError, match="of none of its ways, all kinds of steps were timed"):
        accuracy.main(curves=path, ways="diloco", repeats=1, comm=world)
    with pytest.raises(ConfigError, match="--steps 5: the runs of --curves have 4"):
        accuracy.main(curves=path, steps=5, comm=world)
