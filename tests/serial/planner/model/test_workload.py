"""Workloads as values and files: what is refused, what comes back, and how measurements become one."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espresso_mpi.errors import ConfigError
from espresso_mpi.planner.model.workload import KIND, Workload, WorkloadTensor
from espresso_mpi.types import ITEMSIZE, TensorSpec

TENSORS = (
    WorkloadTensor("head", 12, 0.25, shape=(3, 4)),
    WorkloadTensor("body", 7, 0.25, "float16"),
    WorkloadTensor("stem", 5, 1.0 / 3, "float64", (5,)),
)
WORKLOAD = Workload(TENSORS, "gpu", 0.125, 0.02, "by hand")


def test_properties_are_sums_and_differences():
    assert [t.nbytes for t in TENSORS] == [48, 14, 40]
    assert WORKLOAD.nbytes == 102
    assert WORKLOAD.seconds == 1.0 / 3 + 0.125
    assert WORKLOAD.backward.dtype == np.float64
    np.testing.assert_allclose(WORKLOAD.backward, [0.25, 0, 1 / 12])


def test_a_file_comes_back_exactly(tmp_path):
    WORKLOAD.save(tmp_path / "workload.json")
    assert Workload.load(tmp_path / "workload.json") == WORKLOAD
    assert [p.name for p in tmp_path.iterdir()] == ["workload.json"]  # nothing half-done is left


@st.composite
def workloads(draw):
    times = sorted(draw(st.lists(st.floats(0, 1e3), min_size=1, max_size=8)))
    tensors = tuple(
        WorkloadTensor(
            f"t{i} µ", math.prod(shape), at, draw(st.sampled_from(list(ITEMSIZE))), draw(st.sampled_from([(), shape]))
        )
        for i, at in enumerate(times)
        for shape in [tuple(draw(st.lists(st.integers(1, 9), max_size=4)))]
    )
    return Workload(tensors, draw(st.sampled_from(["cpu", "gpu"])), draw(st.floats(0, 10)), source=draw(st.text()))


@given(workloads())
def test_json_text_comes_back_exactly(workload):
    assert Workload.from_json(json.loads(json.dumps(workload.to_json()))) == workload


def test_a_short_file_has_defaults():
    document = {
        "kind": "espresso_mpi workload",
        "version": KIND.version,
        "tensors": [{"name": "a", "size": 2, "ready": 1}],
    }
    assert Workload.from_json(document) == Workload((WorkloadTensor("a", 2, 1.0),))


def test_numpy_scalars_are_numbers(tmp_path):
    Workload((WorkloadTensor("a", np.int64(6), np.float32(0.5), shape=(np.int64(2), 3)),)).save(tmp_path / "t")
    assert Workload.load(tmp_path / "t").tensors == (WorkloadTensor("a", 6, 0.5, shape=(2, 3)),)


@pytest.mark.parametrize(
    "values, message",
    [
        (("a", 0, 1.0), "size: got 0; expected a whole number of at least 1"),
        (("a", True, 1.0), "size: got True"),
        (("a", 2.0, 1.0), "size: got 2.0"),
        (("a", 2, -1.0), "ready: got -1.0; expected a finite number of at least 0"),
        (("a", 2, math.nan), "ready: got nan"),
        (("a", 2, math.inf), "ready: got inf"),
        (("a", 2, "1"), "ready: got '1'"),
        ((3, 2, 1.0), "tensor 3: name: got 3; expected text"),
        (("a", 2, 1.0, "int8"), "dtype: got 'int8'; expected 'float16' or"),
        (("a", 6, 1.0, "float32", (2, 4)), r"size 6 with shape \[2, 4\]; expected 8 elements"),
        (("a", 6, 1.0, "float32", (-2, -3)), r"shape\[0\]: got -2; expected a whole number of at least 0"),
    ],
)
def test_bad_tensors_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        WorkloadTensor(*values)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tensors": ()}, "got no tensors"),
        (
            {"tensors": TENSORS[::-1]},
            "'body' is ready after 0.25 s, before 'stem' after 0.333333 s; .* sort the tensors",
        ),
        ({"tensors": TENSORS[:1] * 2}, "'head' stands in it twice"),
        ({"device": "tpu"}, "device: got 'tpu'; expected 'cpu' or 'gpu'"),
        ({"update": -1}, "update: got -1"),
        ({"spread": math.nan}, "spread: got nan"),
        ({"source": None}, "source: got None"),
    ],
)
def test_bad_workloads_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        Workload(**{"tensors": TENSORS, **change})


def changed(**change):
    return {**WORKLOAD.to_json(), **change}


@pytest.mark.parametrize(
    "document, message",
    [
        ([], r"got \[\]; expected an object of kind 'espresso_mpi workload', as made by Session.record_workload"),
        ({}, "got kind None"),
        (changed(kind="espresso-profile"), "got kind 'espresso-profile'"),
        (changed(version=2), "got version 2; expected 1; make it anew"),
        (changed(version=True), "got version True"),
        (changed(colour="red"), "contains unknown field `colour`; expected an object .tensors, device"),
        ({k: v for k, v in changed().items() if k != "tensors"}, "missing required field `tensors`"),
        (changed(tensors={}), r"tensors: got \{\}; expected a list"),
        (changed(tensors=[7]), r"tensors\[0\]: got 7; expected an object .name, size, ready"),
        (changed(tensors=[{"name": "a", "size": 1}]), r"tensors\[0\]: missing required field `ready`"),
        (changed(tensors=[{"name": "a", "size": 1, "ready": 0, "bytes": 4}]), r"\[0\]: contains unknown field `bytes`"),
        (changed(tensors=[{"name": "a", "size": 1, "ready": 0, "shape": 1}]), "shape: got 1; expected a list"),
        (changed(tensors=[{"name": "a", "size": 1, "ready": 0, "dtype": []}]), r"dtype: got \[\]"),
    ],
)
def test_bad_documents_are_refused(document, message):
    with pytest.raises(ConfigError, match=message):
        Workload.from_json(document)


@pytest.mark.parametrize(
    "content, message", [(b"{", "expected JSON"), (b"\xff", "expected JSON"), (b"[]", r"got \[\]; expected an object")]
)
def test_bad_files_are_refused_by_name(tmp_path, content, message):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"t\.json: .*{message}"):
        Workload.load(tmp_path / "t.json")


def test_files_that_cannot_be_opened_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read"):
        Workload.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"t\.json: cannot be written"):
        WORKLOAD.save(tmp_path / "none" / "t.json")


# --- from measurements ------------------------------------------------------------------------------------------------

SPECS = [TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (4,), "float16"), TensorSpec("c", (5,), "float32")]


def measured(specs=SPECS, ready=((3, 1, 3), (9, 0, 1), (4, 2, 4)), steps=(10, 12, 20), update=(1, 3, 2)):
    return Workload.of_steps(specs, np.array(ready, float), np.array(steps), np.array(update), "cpu", "three steps")


def test_medians_over_steps_in_order_of_readiness():
    """Medians: a 4, b 1, c 3. Quartiles of the steps: 11 and 16, median 12."""
    workload = measured()
    assert [(t.name, t.ready, t.dtype, t.shape) for t in workload.tensors] == [
        ("b", 1.0, "float16", (4,)), ("c", 3.0, "float32", (5,)), ("a", 4.0, "float32", (2, 3))
    ]  # fmt: skip
    assert (workload.update, workload.spread) == (2.0, pytest.approx(5 / 12))
    assert (workload.device, workload.source) == ("cpu", "three steps")


def test_equal_times_keep_the_order_of_the_caller():
    assert [t.name for t in measured(ready=np.ones((3, 3))).tensors] == ["a", "b", "c"]


def test_one_step_has_no_spread():
    assert measured(ready=[[1, 2, 3]], steps=[4], update=[0]).spread == 0


def test_tensors_without_elements_are_left_out():
    specs = [SPECS[0], TensorSpec("none", (0,), None), TensorSpec("empty", (0, 3), "float32")]
    assert [t.name for t in measured(specs).tensors] == ["a"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"ready": np.ones((3, 2))}, r"ready has shape \(3, 2\), .*expected \(steps, tensors\)"),
        ({"ready": np.ones(3)}, r"ready has shape \(3,\)"),
        ({"update": [1, 2]}, r"update has shape \(2,\)"),
        ({"steps": np.ones((3, 1))}, "expected"),
        ({"ready": np.ones((0, 3)), "steps": [], "update": []}, "at least one step"),
        ({"ready": np.full((3, 3), np.nan)}, "ready holds a time that is negative or not finite"),
        ({"steps": [1, -1, 1]}, "steps holds a time that is negative"),
    ],
)
def test_bad_measurements_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        measured(**change)
