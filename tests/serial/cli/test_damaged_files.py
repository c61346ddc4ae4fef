"""Files that a user may damage: whatever stands in them, they are read, or refused by one line that names the file."""

from __future__ import annotations

import json
import random
import re
from contextlib import suppress

import pytest

from espresso_mpi.bench import report, tensors
from espresso_mpi.errors import ConfigError, EspressoError
from espresso_mpi.files.output import RESULT_BYTES
from espresso_mpi.planner import planfile
from espresso_mpi.planner.explain import explain
from espresso_mpi.planner.model import profile_json
from espresso_mpi.planner.model import workload as workload_module
from espresso_mpi.planner.model.curve import Curve, Sample
from espresso_mpi.planner.model.profile import Profile
from espresso_mpi.planner.model.workload import Workload, WorkloadTensor
from espresso_mpi.planner.workloads import clusters as cluster_module
from espresso_mpi.planner.workloads.clusters import Cluster, DeviceMemory, Link
from espresso_mpi.tracing import pictures, trace_file
from espresso_mpi.tracing.recording import Span
from espresso_mpi.types import Forecast, MadeFor, Outlook, Plan, Strategy

MUTATIONS = 150

STRANGE = (
    None, True, -1, 0, 2**62, 10**400, -(10**400), 1e308, -1e308, float("inf"), float("nan"), 0.5, "", "$", "a$b$^{",
    "\ud800", "\n", "cpu", [], [None], {}, {"a": {}}, "NESTED 100000", "NESTED 900",
)  # fmt: skip
"""Values in the place of others; NESTED is written as so many lists in lists."""


def session_trace():
    ranks = []
    for rank in (0, 1):
        spans = []
        for step in (0, 1):
            for number, name in enumerate(("head.weight", "body.bias")):
                at = step + 0.1 * number + 0.01 * rank
                spans.append(Span("agree", "", 0, 0, at, at + 0.01))
                spans.append(Span("encode", name, step, 0, at + 0.01, at + 0.03, "encode@cpu"))
                spans.append(Span("wire", name, step, 0, at + 0.03, at + 0.09, "alltoall@inter", "inter", 64, 64))
                spans.append(Span("wait", name, step, 0, at + 0.05, at + 0.09, "alltoall@inter", "inter"))
        ranks.append(trace_file.RankTrace(rank, rank, f"host{rank}", spans))
    return trace_file.chrome(ranks, {"clocks": [{"node": 1, "offset_s": 1e-3, "known_within_s": 1e-5}]})


def profile():
    curve = Curve((1.0, 4096.0), (1e-6, 1e-5), 0.01, (Sample(1, 1e-6, 0.1, 3), Sample(4096, 1e-5, 0.1, 3)))
    return Profile(
        2, 2, {("onebit", "cpu", "encode"): curve, ("onebit", "cpu", "decode"): curve},
        {("alltoall", "inter", True): curve, ("allreduce", "flat", False): curve}, {"to_host": curve}, curve,
        environment={"cpu": "some", "versions": {"numpy": None}}, fingerprint={"mpi": "Open MPI 5"},
    ).to_json()  # fmt: skip


def model_workload():
    return Workload(
        (WorkloadTensor("head", 12, 0.25, shape=(3, 4)), WorkloadTensor("body", 7, 0.5, "float16"))
    ).to_json()


def plan():
    dense, onebit = Strategy("none", "flat"), Strategy("onebit", "flat-alltoall")
    tensors = {"w": ((4, 3), "float32"), "b": ((3,), "float32"), "c": (7, "float64")}
    made_for = MadeFor(tensors, 2, 4, "cpu", {"mpi": "Open MPI 5.0"})
    buffers = (Outlook(("w",), 0.1, 0.05, dense, 0.02, 0.03), Outlook(("b", "c"), 0.01, 0.0))
    forecast = Forecast(0.3, 0.25, 0.2, 0.4, 0.01, "fifo", "host", "all routes", 0.0, {"fp32": 0.4}, buffers, 0.1)
    groups = (("b", "c"),)
    return planfile.to_json(Plan({"w": onebit, "b": dense, "c": dense}, None, groups, 0, made_for, forecast))


def cluster():
    memory = {"cpu": DeviceMemory(1e11, 0.5, 1e-6, 4)}
    return Cluster("two", 2, 4, Link(1e-6, 1e-10), Link(1e-5, 1e-9), {}, memory, ("onebit",)).to_json()


def benchmark():
    rows = [
        tensors.Row(method=name, tensors=3, nbytes=100, seconds=at, p99=at, wrong=0, repeats=3)
        for name, at in ((tensors.FUSED, 1.0), (tensors.EACH, 4.0))
    ]
    about = {"date": "today", "cpu": "some", "cores": 2, "memory_bytes": 1 << 30, "system": "Linux", "python": "3"}
    more = {"mpi": {"library": "Open MPI", "version": "5"}, "versions": {"numpy": "2"}, "job": {"ranks": 2}}
    return {"environment": {**about, **more}, "rows": [vars(row) for row in rows], "kind": "tensors", "network": "some"}


def load_step(path):
    return pictures.one_step(trace_file.read(path), None, path)


def draw(step):
    for number, rank in enumerate(step.ranks):
        assert list(pictures._bars(rank, number)) or not rank.spans
        pictures._sums(rank)


def ask(profile):
    assert profile.noise() >= 0
    assert all(curve(1 << 20) >= 0 for _, curve in profile.curves())


def sums(workload):
    assert workload.nbytes > 0
    assert len(workload.backward) == len(workload.tensors)


KINDS = {
    "timeline": (session_trace, load_step, draw),
    "profile": (profile, Profile.load, ask),
    "workload": (model_workload, Workload.load, sums),
    "plan": (plan, planfile.load, explain),
    "cluster": (cluster, Cluster.load, Cluster.profile),
    "report": (benchmark, lambda path: report.main(results=[path], output=path.with_suffix(".md")), repr),
}


def places(value, found):
    """All (container, key) in a document."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], (dict, list)):
            places(value[key], found)
    return found


def mutated(document, rng):
    """A damaged text: one or two values replaced, removed or moved, or bytes lost or changed."""
    document = json.loads(json.dumps(document))
    for _ in range(rng.choice((1, 1, 2))):
        holder, key = rng.choice(places(document, []))
        way = rng.randrange(8)
        if way < 4:
            holder[key] = rng.choice(STRANGE)
        elif way == 4:
            del holder[key]
        elif way == 5 and isinstance(holder, dict):
            holder[f"{key}x"] = holder.pop(key)
        elif way == 6 and isinstance(holder, list):
            holder.append(holder[key])
        else:
            other, another = rng.choice(places(document, []))
            holder[key], other[another] = json.loads(json.dumps((other[another], holder[key])))
    nested = re.sub(r'"NESTED (\d+)"', lambda m: "[" * int(m[1]) + "]" * int(m[1]), json.dumps(document))
    text = bytearray(nested.encode())
    if rng.random() < 0.4:
        at = rng.randrange(len(text))
        way = rng.randrange(3)
        if way == 0:
            del text[at:]
        elif way == 1:
            del text[at : at + rng.randrange(1, 9)]
        else:
            text[at] = rng.randrange(256)
    return bytes(text)


LARGEST = {
    "timeline": trace_file.MOST_BYTES, "profile": profile_json.MOST_BYTES, "workload": workload_module.MOST_BYTES,
    "plan": planfile.MOST_BYTES, "cluster": cluster_module.MOST_BYTES, "report": RESULT_BYTES,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_decoders_let_pass_is_refused_in_every_file(kind, tmp_path):
    """Also in parts of which nobody knows the types, or that are read over."""
    make, load, _ = KINDS[kind]
    path, document = tmp_path / "f.json", make()
    holder, key = next((h, k) for h, k in places(document, []) if isinstance(h[k], dict) and h[k])
    inner, name = holder[key], next(iter(holder[key]))
    for text, says in (
        ("NaN", "got NaN; expected a finite number"),
        ("1e400", "got 1e400; expected a finite number"),
        ("1" + 400 * "0", "expected a whole number of 64 bits"),
        ("1" + 5000 * "0", "expected a whole number of 64 bits"),
        (100_000 * "[" + 100_000 * "]", "nest more than 64 deep"),
        (100_000 * '{"a":', "nest more than 64 deep"),
        (f'0, "{name}": 0', "the key stands twice"),
    ):
        inner[name] = "HERE"
        path.write_text(json.dumps(document).replace('"HERE"', text))
        with pytest.raises(ConfigError, match=rf"f\.json: .*{name}.*{says}"):
            load(path)
    with path.open("wb") as file:
        file.truncate(LARGEST[kind] + 1)
    with pytest.raises(ConfigError, match=rf"f\.json: has {LARGEST[kind] + 1} bytes; expected at most {LARGEST[kind]}"):
        load(path)


def test_a_name_that_looks_like_a_formula_is_drawn_as_it_is(tmp_path):
    pytest.importorskip("matplotlib")
    spans = [Span("wire", "w$^{$", 0, 0, 0.0, 1.0, "alltoall@inter", "inter", 8, 8)]
    trace_file.write(tmp_path / "t.json", trace_file.chrome([trace_file.RankTrace(0, 0, "host", spans)]))
    pictures.main(tmp_path / "t.json", tmp_path / "t.svg")
    assert "w$^{$" in (tmp_path / "t.svg").read_text()
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.svg: cannot be written"):
        pictures.main(tmp_path / "t.json", tmp_path / "folder.svg")


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_read_or_refused(kind, tmp_path):
    make, load, use = KINDS[kind]
    path, rng, document = tmp_path / "f.json", random.Random(kind), make()
    path.write_text(json.dumps(document))
    use(load(path))
    refused = 0
    for number in range(MUTATIONS):
        path.write_bytes(mutated(document, rng))
        problem = None
        try:
            loaded = load(path)
        except EspressoError as error:
            problem = str(error)
        if problem is None:
            with suppress(EspressoError):
                use(loaded)
        else:
            refused += 1
            assert re.fullmatch(".*f.json.*", problem), f"mutation {number}: {problem}"
    assert refused > MUTATIONS / 4, "the mutations damage nothing"
