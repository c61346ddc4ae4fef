"""Finding compressors by name, reading specs, parameters and schedules, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pytest

from espresso_mpi.compressors import Compressor, ParameterSchedule, get, names, read_specs, register, unregister
from espresso_mpi.compressors.checks import check_choice, check_number, check_positive_int
from espresso_mpi.errors import ConfigError


@dataclass(frozen=True)
class Toy(Compressor):
    """Has one parameter of every type."""

    count: int = 3
    share: float = 0.5
    exact: bool = False
    mode: str = "plain"
    name = "toy"

    def __post_init__(self):
        check_positive_int(self.name, "count", self.count, 1, 100)
        check_number(self.name, "share", self.share, 0, 1, above=True)
        check_choice(self.name, "mode", self.mode, ("plain", "fancy"))

    def nbytes(self, n):
        return self.count * n

    def _encode_cpu(self, x, payload, residual, context):
        payload.fill(0)

    def _decode_cpu(self, payload, out, add, context):
        out.fill(0)


@pytest.fixture
def toy():
    yield register(Toy)
    unregister("toy")


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_a_method_without_a_schedule_is_itself_in_every_step(name):
    """Calls are prepared for the method of a tensor, and compare it."""
    method = get(name)
    assert method.at(3) is method.at(None) is method


def test_finds_every_file():
    assert {"fp16", "int8", "onebit", "topk"} <= set(names())
    assert list(names()) == sorted(names())


@pytest.mark.parametrize("name", names())
def test_a_method_says_what_it_is(name):
    compressor = get(name)
    assert compressor.name == name and str(compressor) == name
    assert get(compressor) is compressor
    assert (type(compressor).__doc__ or "").strip(), "the class has no docstring"
    assert all(type(f.default) in (int, float, bool, str) for f in fields(compressor)), "a default of another type"


def test_registers_and_forgets(toy):
    assert "toy" in names() and get("toy") == Toy()
    assert register(Toy) is Toy, "registering a class again is no error: a module may be reloaded"
    unregister("toy")
    assert "toy" not in names()
    unregister("toy")


def test_a_name_is_taken_once():
    class Another(type(get("fp16"))):
        pass

    with pytest.raises(ConfigError, match="registered twice"):
        register(Another)
    assert type(get("fp16")).__name__ == "Fp16"


class Shape(Compressor):
    """Complete, and each test spoils it in one way."""

    name = "test-shape"

    def nbytes(self, n):
        return 4 * n

    def _encode_cpu(self, x, payload, residual, context):
        payload.view(np.float32)[...] = x

    def _decode_cpu(self, payload, out, add, context):
        out[...] = payload.view(np.float32)


def spoilt(**members):
    return type("Spoilt", (Shape,), members)


@pytest.mark.parametrize(
    "cls, words",
    [
        (int, "no subclass"),
        (spoilt(name=3), "name=3"),
        (spoilt(name="none"), "not 'none'"),
        (spoilt(name="a,b"), "lower-case"),
        (type("Bare", (Compressor,), {"name": "bare"}), "lacks _decode_cpu, _encode_cpu, nbytes"),
        (spoilt(__annotations__={"level": int}, level=3), "no dataclass"),
        (dataclass(frozen=True)(spoilt(__annotations__={"level": tuple}, level=(1, 2))), "level needs a default"),
    ],
)
def test_a_class_that_no_spec_could_make_is_refused(cls, words):
    with pytest.raises(ConfigError, match=words):
        register(cls)
    assert "test-shape" not in names()


# --- specs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec, expected",
    [
        ("toy", Toy()),
        (" toy ", Toy()),
        ("toy:", Toy()),
        ("toy:count=4", Toy(4)),
        ("toy: count = 4 , share=1e-3 ,", Toy(4, 0.001)),
        ("toy:exact=true,mode=fancy", Toy(exact=True, mode="fancy")),
        ("toy:exact=False", Toy()),
        ("toy:share=1", Toy(share=1.0)),
        ("toy:count=8~2@6/3", Toy(ParameterSchedule(8, 2, 6, 3))),
        ("toy:share=0.25~0.001@400", Toy(share=ParameterSchedule(0.25, 0.001, 400, 4))),
        ("toy:share=0.5~0.25@2", Toy(share=ParameterSchedule(0.5, 0.25, 2, 2))),
    ],
)
def test_reads_a_spec_and_writes_one(spec, expected, toy):
    assert get(spec) == expected
    assert get(str(expected)) == expected


@pytest.mark.parametrize(
    "spec",
    [
        "nothing-like-it",
        "",
        ":count=3",
        "toy:count=0",
        "toy:count=101",
        "toy:count=many",
        "toy:count=3.5",
        "toy:count",
        "toy:size=3",
        "toy:share=0",
        "toy:share=1.5",
        "toy:share=nan",
        "toy:exact=1",
        "toy:mode=plane",
        "toy:count=0~4@8",
        "toy:count=4~101@8",
        "toy:count=4~2@0",
        "toy:count=4~2@8/9",
        "toy:count=4~2@8/0",
        "toy:count=4~2",
        "toy:share=0.1~2@8",
        "toy:exact=true~false@8",
    ],
)
def test_refuses_specs_that_do_not_fit(spec, toy):
    with pytest.raises(ConfigError):
        get(spec)


def test_errors_name_what_is_known(toy):
    with pytest.raises(ConfigError, match=r"'gzip' is not known; known are none, .*int8"):
        get("gzip")
    with pytest.raises(ConfigError, match="takes count=<int>, share=<float>, exact=<bool>, mode=<str>"):
        get("toy:size=3")
    with pytest.raises(ConfigError, match="expected a spec"):
        get(8)  # type: ignore[arg-type]


def test_reads_a_list_of_specs(toy):
    text = " none, toy:count=2,share=0.5 ,fp16,toy "
    assert read_specs(text) == ["none", "toy:count=2,share=0.5", "fp16", "toy"]


@pytest.mark.parametrize("text", ["", " , ", "count=3", "toy,gzip", "none,toy:count=0"])
def test_refuses_lists_that_do_not_fit(text, toy):
    with pytest.raises(ConfigError):
        read_specs(text)


# --- schedules --------------------------------------------------------------------------------------------------------


def test_a_schedule_goes_in_equal_factors():
    """DGC's warm-up: 25, 6.3, 1.6, 0.4 %, then 0.1 %."""
    schedule = ParameterSchedule(0.25, 0.001, 400)
    assert [schedule.at(step) for step in (0, 99, 100, 399)] == pytest.approx([0.25, 0.25, 0.0629, 0.00398], rel=1e-2)
    assert schedule.at(400) == schedule.at(10**9) == 0.001


def test_a_schedule_of_whole_numbers_stays_whole():
    values = [ParameterSchedule(256, 16, 8, 4).at(step) for step in range(10)]
    assert values == [256, 256, 128, 128, 64, 64, 32, 32, 16, 16]
    assert all(type(value) is int for value in values)


def test_at_settles_every_schedule_and_nothing_else():
    toy = Toy(ParameterSchedule(8, 2, 4, 2), ParameterSchedule(1.0, 0.25, 4, 2), mode="fancy")
    assert toy.at(0) == Toy(8, 1.0, mode="fancy")
    assert toy.at(2) == Toy(4, 0.5, mode="fancy")
    assert toy.at(None) == toy.at(4) == Toy(2, 0.25, mode="fancy")
    assert toy.at(0).nbytes(10) == 80 and toy.at(None).nbytes(10) == 20
    settled = Toy(5)
    assert settled.at(3) is settled


@pytest.mark.parametrize("arguments", [(0, 1, 5), (1, -1, 5), (1, 2, 0), (1, 2, 5, 0), (1, 2, 5, 6), (np.nan, 1, 5)])
def test_refuses_schedules_that_do_not_fit(arguments):
    with pytest.raises(ConfigError, match="schedule"):
        ParameterSchedule(*arguments)


# --- checks of parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 101, -3, 3.0, "3", True, None])
def test_whole_numbers_are_checked(value):
    with pytest.raises(ConfigError, match=r"count=.*expected a whole number from 1 to 100"):
        Toy(count=value)


@pytest.mark.parametrize("value", [0, 1.01, -0.5, float("nan"), float("inf"), "0.5", True, None])
def test_numbers_are_checked(value):
    with pytest.raises(ConfigError, match=r"share=.*expected a number above 0 to 1"):
        Toy(share=value)
