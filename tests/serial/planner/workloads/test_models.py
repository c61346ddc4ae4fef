"""The shipped models against published counts, against modules that torch builds, and against hand-made sums."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from espresso_mpi.errors import ConfigError
from espresso_mpi.planner.workloads import language, vision
from espresso_mpi.planner.workloads.layers import Layer, NetworkStep, Work, backwards, network_step
from espresso_mpi.planner.workloads.measured import Measured, Times
from espresso_mpi.planner.workloads.models import BANDWIDTH, MODELS, Published, model_workload

WORKLOADS = {name: model_workload(name) for name in MODELS}
MODELLED = {name: model_workload(name, speed=model.speed) for name, model in MODELS.items()}
PAGE = (Path(__file__).parents[4] / "docs" / "models.md").read_text()

PUBLISHED = {
    "vgg16": 138_357_544,  # torchvision's documentation
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "gpt2": 124_439_808,
}

PAPER = {  # MiB and tensors, Espresso's table 4; BERT-base has 207 there, see docs/models.md
    "vgg16": (528, 32),
    "resnet101": (170, 314),
    "ugatit": (2559, 148),
    "bert-base": (420, 206),
    "gpt2": (475, 148),
    "lstm": (328, 10),
}

MEASURED = {  # milliseconds from the first gradient to the last, public traces of a V100
    "vgg16": 85,
    "resnet101": 120,
    "ugatit": 434,
    "bert-base": 66,
    "gpt2": 211,
    "lstm": 71,
}


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    assert MODELS[name].parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    "name, hidden, published", [("bert-base", 768, 109_482_240), ("bert-large", 1024, 335_141_888)]
)
def test_bert_without_its_heads_has_the_published_parameters(name, hidden, published):
    shapes = MODELS[name].shapes()
    heads = sum(math.prod(shape) for key, shape in shapes.items() if key.startswith("cls."))
    assert heads == (hidden * hidden + hidden) + 2 * hidden + 30522 + (2 * hidden + 2)
    assert MODELS[name].parameters - heads == published


@pytest.mark.parametrize("name", PAPER)
def test_megabytes_and_tensors_are_those_of_the_paper(name):
    workload = WORKLOADS[name]
    assert (round(workload.nbytes / 2**20), len(workload.tensors)) == PAPER[name]


def test_resnets_have_a_normalisation_for_every_convolution():
    for name, blocks in (("resnet50", 16), ("resnet101", 33)):
        shapes = MODELS[name].shapes()
        convolutions = [shape for shape in shapes.values() if len(shape) == 4]
        assert len(convolutions) == 3 * blocks + 4 + 1
        assert len(shapes) == 3 * len(convolutions) + 2
        assert shapes["layer4.0.downsample.0.weight"] == (2048, 1024, 1, 1)
        assert list(shapes)[:2] == ["fc.bias", "fc.weight"]
        assert list(shapes)[-1] == "conv1.weight"


def test_ugatit_has_two_generators_and_four_discriminators():
    shapes = MODELS["ugatit"].shapes()
    networks = {key.split(".")[0] for key in shapes}
    counts = {net: sum(key.startswith(f"{net}.") for key in shapes) for net in networks}
    assert counts == {"genA2B": 44, "genB2A": 44, "disGA": 17, "disLA": 13, "disGB": 17, "disLB": 13}
    assert shapes["genA2B.FC.0.weight"] == (256, 64 * 64 * 256)
    assert shapes["disGA.conv1x1.weight"] == (2048, 4096, 1, 1)


@pytest.mark.parametrize("name", MODELS)
def test_a_workload_holds_the_shapes_in_order(name):
    workload = WORKLOADS[name]
    assert {t.name: t.shape for t in workload.tensors} == MODELS[name].shapes()
    assert [t.name for t in workload.tensors] == list(MODELS[name].shapes())
    assert (workload.device, workload.spread) == ("gpu", 0)
    assert workload.source.startswith(f"{name}, batch of {MODELS[name].batch} × ")


@pytest.mark.parametrize(
    "name, last",
    [
        ("vgg16", "features.0.weight"),
        ("bert-base", "bert.embeddings.word_embeddings.weight"),
        ("gpt2", "transformer.wte.weight"),
        ("lstm", "encoder.weight"),
    ],
)
def test_what_is_nearest_to_the_input_comes_last(name, last):
    assert WORKLOADS[name].tensors[-1].name == last


# --- against torch ----------------------------------------------------------------------------------------------------


def lstm_of(torch):
    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = torch.nn.Embedding(33278, 1500)
            self.rnn = torch.nn.LSTM(1500, 1500, 2)
            self.decoder = torch.nn.Linear(1500, 33278)
            self.decoder.weight = self.encoder.weight

    return Words()


def vgg_of(nn):
    layers, inputs = [], 3
    for outputs in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()] if outputs else [nn.MaxPool2d(2)]
        inputs = outputs or inputs
    head = [nn.Linear(25088, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(nn.Sequential(*layers), nn.Flatten(), nn.Sequential(*head, nn.Linear(4096, 1000)))


def shapes_of(module):
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def test_the_lstm_is_what_torch_builds():
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        assert shapes_of(lstm_of(torch)) == MODELS["lstm"].shapes()


def test_vgg16_and_its_operations_are_what_torch_builds_and_counts():
    torch = pytest.importorskip("torch")
    flop_counter = pytest.importorskip("torch.utils.flop_counter")
    with torch.device("meta"):
        module, image = vgg_of(torch.nn), torch.zeros(1, 3, 224, 224)
        with flop_counter.FlopCounterMode(display=False) as counter:
            module(image).sum().backward()
    names = {"0": "features", "2": "classifier"}
    renamed = {f"{names[key[0]]}{key[1:]}": shape for key, shape in shapes_of(module).items()}
    assert renamed == MODELS["vgg16"].shapes()
    assert MODELS["vgg16"].flops(1) == counter.get_total_flops()


def test_berts_blocks_and_their_operations_are_those_of_torchs_encoder():
    torch = pytest.importorskip("torch")
    flop_counter = pytest.importorskip("torch.utils.flop_counter")
    with torch.device("meta"):
        block = torch.nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True)
        words = torch.zeros(1, 128, 768, requires_grad=True)
        with (
            flop_counter.FlopCounterMode(display=False) as counter,
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        ):
            block(words).sum().backward()
    ours = [*language._bert_block("block", 768, 12, 128)]
    assert sum(math.prod(shape) for layer in ours for _, shape in layer.parameters) == sum(
        p.numel() for p in block.parameters()
    )
    assert sum(layer.forward.flops + layer.backward.flops for layer in ours) == counter.get_total_flops()


# --- operations and times ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, products", [("vgg16", 15.47e9), ("resnet50", 4.089e9), ("resnet101", 7.801e9)])
def test_forward_operations_are_twice_torchvisions_products(name, products):
    assert MODELS[name].step.before.flops == pytest.approx(2 * products, rel=1e-3)


@pytest.mark.parametrize(
    "name, weights", [("gpt2", 12 * 12 * 768**2 + 50257 * 768), ("lstm", 4 * 4 * 1500**2 + 33278 * 1500)]
)
def test_a_token_takes_six_operations_a_weight_and_attention_besides(name, weights):
    """Kaplan et al. 2020: 2 forward, 4 backward; the first layers are embeddings, so nothing is spared."""
    attention = 12 * 4 * 80 * 768 * 3 if name == "gpt2" else 0
    assert MODELS[name].flops(1) == pytest.approx(80 * (6 * weights + attention))


def test_backward_is_twice_forward_but_for_the_first_layer():
    first = 2 * 64 * 3 * 7**2 * 112**2
    forward = MODELS["resnet50"].step.before.flops
    assert MODELS["resnet50"].flops(1) == pytest.approx(3 * forward - first)


def test_a_step_by_hand():
    """Two layers: 10 + 20 operations forward at 10 a second, 40 + 10 backward; the second moves 6 bytes at 2 a second
    for each of 3 samples, and 8 bytes of weights."""
    one = Layer((("a.weight", (2,)), ("a.bias", (1,))), Work(10), Work(20))
    two = Layer((("b", (3,)),), Work(20), Work(40, 6, 8))
    step = network_step([one, two])
    assert step == NetworkStep(
        Work(30), (((("b", (3,)),), Work(40, 6, 8)), ((("a.bias", (1,)), ("a.weight", (2,))), Work(10)))
    )
    assert step.before.seconds(3, 10, 2) == 9
    assert step.events[0][1].seconds(3, 10, 2) == 12 + 9 + 4


@pytest.mark.parametrize("name", [name for name in MODELS if isinstance(MODELS[name].published, Published)])
def test_the_published_throughput_comes_out(name):
    published = MODELS[name].published
    workload = model_workload(name, batch=published.batch, speed=MODELS[name].speed)
    seconds = workload.seconds if published.update else workload.tensors[-1].ready
    assert published.batch / seconds == pytest.approx(published.throughput)


def test_a_speed_is_confirmed_by_another_model():
    """ResNet-152, 16 images, PyTorch 0.3 on a V100: 38.7 ms forward, 136.5 ms in all (github.com/u39kun)."""
    step, speed = vision.resnet(3, 8, 36, 3), MODELS["resnet50"].speed
    forward = step.before.seconds(16, speed, BANDWIDTH)
    assert forward == pytest.approx(38.7e-3, rel=0.1)
    assert forward + sum(w.seconds(16, speed, BANDWIDTH) for _, w in step.events) == pytest.approx(136.5e-3, rel=0.2)


@pytest.mark.parametrize("name", MODELS)
def test_speeds_are_a_v100s(name):
    """Products reach at most its 15.7e12; 3 × 3 convolutions may count up to 2.25 times that, by Winograd's method."""
    convolutional = name in ("vgg16", "ugatit", "resnet50", "resnet101")
    assert 5e12 < MODELS[name].speed < 15.7e12 * (2.25 if convolutional else 1)


@pytest.mark.parametrize("name", MODELS)
def test_times_go_by_speed_and_by_batch(name):
    model = MODELS[name]
    once, twice, thrice = (ready(model_workload(name, batch=b)) for b in (4, 8, 12))
    np.testing.assert_allclose(thrice - twice, twice - once, rtol=1e-9)
    fast = model_workload(name, batch=4, speed=2 * model.speed, device="cpu")
    np.testing.assert_allclose(2 * ready(fast), ready(model_workload(name, batch=4, speed=model.speed)))
    assert 2 * fast.update == pytest.approx(model.update)
    assert fast.device == "cpu"


def ready(workload):
    return np.array([t.ready for t in workload.tensors])


@pytest.mark.parametrize("name", MODELS)
def test_gradients_begin_after_the_forward_pass(name):
    model, workload = MODELS[name], MODELLED[name]
    forward = model.step.before.seconds(model.batch, model.speed, BANDWIDTH)
    assert workload.tensors[0].ready > forward > 0
    assert np.all(workload.backward >= 0)


def test_what_yields_no_gradient_counts_for_the_next_that_does():
    events = (((), Work(1, 2, 3)), ((("a", (2,)),), Work(4)), ((("b", (1,)),), Work()), ((), Work(8)))
    assert NetworkStep(Work(9), events).gradients == (((("a", (2,)),), Work(5, 2, 3)), ((("b", (1,)),), Work()))


# --- measured totals --------------------------------------------------------------------------------------------------


def backward_of(workload):
    """Seconds from the first gradient to the last."""
    return workload.tensors[-1].ready - workload.tensors[0].ready


def test_six_models_take_the_measured_time_from_the_first_gradient_to_the_last():
    assert {name for name, model in MODELS.items() if model.measured is not None} == set(MEASURED)
    for name, milliseconds in MEASURED.items():
        assert backward_of(WORKLOADS[name]) == pytest.approx(milliseconds / 1e3, rel=1e-12)
        assert "public V100 traces" in WORKLOADS[name].source and f"{milliseconds} ms" in WORKLOADS[name].source


@pytest.mark.parametrize("name", MODELS)
def test_a_given_total_scales_every_modelled_time_but_the_update(name):
    """The forward pass as well; U-GAT-IT's modelled times are not in proportion to the measured: see its own test."""
    workload, plain = model_workload(name, backward=0.211), WORKLOADS[name]
    assert backward_of(workload) == pytest.approx(0.211, rel=1e-12)
    np.testing.assert_allclose(ready(workload), 0.211 / backward_of(plain) * ready(plain), rtol=1e-12)
    assert [t.name for t in workload.tensors] == [t.name for t in plain.tensors]
    assert workload.update == plain.update == MODELLED[name].update
    assert "211 ms as given" in workload.source
    if name != "ugatit":
        np.testing.assert_allclose(ready(workload), 0.211 / backward_of(MODELLED[name]) * ready(MODELLED[name]))


def test_a_given_total_holds_for_any_batch():
    assert backward_of(model_workload("gpt2", batch=3, backward=2)) == pytest.approx(2, rel=1e-12)


@pytest.mark.parametrize("name", MEASURED)
def test_other_batches_go_by_the_factor_of_the_usual_one(name):
    """Of all tensors but U-GAT-IT's, whose long gap has a factor of its own at every batch."""
    model = MODELS[name]
    other, modelled = (model_workload(name, batch=2 * model.batch, **more) for more in ({}, {"speed": model.speed}))
    factors = np.divide(*(np.diff(np.unique(ready(t))) for t in (other, modelled)))
    usual = np.divide(*(np.diff(np.unique(ready(t))) for t in (WORKLOADS[name], MODELLED[name])))
    np.testing.assert_allclose(factors, usual, rtol=1e-6)
    assert np.sum(~np.isclose(factors, np.median(factors), rtol=1e-6)) == (1 if name == "ugatit" else 0)


def test_ugatits_one_long_gap_is_the_measured_one():
    """Between the discriminators and the generators; the other modelled gaps share the rest in proportion."""
    gaps, modelled = WORKLOADS["ugatit"].backward[1:], MODELLED["ugatit"].backward[1:]
    assert np.argmax(gaps) == np.argmax(modelled) == 59
    assert gaps[59] == pytest.approx(0.335, rel=1e-12)
    others, theirs = np.delete(gaps, 59), np.delete(modelled, 59)
    np.testing.assert_allclose(others, 0.099 / theirs.sum() * theirs, rtol=1e-9, atol=1e-15)
    first, its = WORKLOADS["ugatit"].tensors[0].ready, MODELLED["ugatit"].tensors[0].ready
    assert first == pytest.approx(its * 0.434 / backward_of(MODELLED["ugatit"]))


def test_measured_times_by_hand():
    """7 s in gaps of 1, 4 and 2 become 21; or 4 becomes 15 and the other 3 become 6. Before the first: times 3."""
    usual = Times(2, (5, 1, 4, 2))
    assert usual.ready == (7, 8, 12, 14)
    assert Measured(21, "").scaled(usual, usual) == Times(6, (15, 3, 12, 6))
    assert Measured(21, "", gap=15).scaled(usual, usual) == Times(6, (15, 2, 15, 4))
    assert Measured(21, "", gap=15).scaled(Times(1, (1, 8, 8, 8)), usual) == Times(3, (3, 16, 30, 16))


def test_weight_and_bias_are_ready_together_and_layers_are_not():
    times = {t.name: t.ready for t in WORKLOADS["vgg16"].tensors}
    assert all(times[key] == times[key.replace("weight", "bias")] for key in times)
    assert len(set(times.values())) == 16
    assert len({t.ready for t in WORKLOADS["lstm"].tensors if t.name.startswith("rnn")}) == 1


def test_ugatits_discriminators_come_before_its_generators():
    names = [t.name.split(".")[0] for t in WORKLOADS["ugatit"].tensors]
    assert list(dict.fromkeys(names)) == ["disLB", "disGB", "disLA", "disGA", "genB2A", "genA2B"]
    pause = WORKLOADS["ugatit"].backward[60]
    assert pause > 0.3 * WORKLOADS["ugatit"].seconds  # the generators' forward passes and most of their backward ones


def test_only_the_first_layer_is_spared_its_inputs_gradient():
    layers = [Layer((), Work(1), Work(2, 3, 5))] * 2
    assert backwards(layers) == (((), Work(2, 3, 5)), ((), Work(1, 3, 5)))


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"name": "resnet-101"}, r"got 'resnet-101'; expected one of vgg16, .*; did you mean 'resnet101'\?"),
        ({"name": "BERT-base"}, "did you mean 'bert-base'"),
        ({"name": "xyz"}, "ugatit, bert-base, bert-large, gpt2, lstm$"),
        ({"name": "lstm", "batch": 0}, "batch: got 0; expected a whole number of at least 1"),
        ({"name": "lstm", "batch": 1.5}, "batch: got 1.5"),
        ({"name": "lstm", "speed": 0}, "speed: got 0; expected operations per second above 0"),
        ({"name": "lstm", "speed": math.inf}, "speed: got inf"),
        ({"name": "lstm", "backward": 0}, "backward: got 0; expected seconds above 0"),
        ({"name": "lstm", "backward": -0.2}, "backward: got -0.2; expected seconds above 0"),
        ({"name": "lstm", "backward": math.inf}, "backward: got inf; expected seconds above 0 and up to 1e\\+08"),
        ({"name": "lstm", "backward": math.nan}, "backward: got nan; expected seconds above 0"),
        ({"name": "lstm", "backward": 1e9}, "backward: got 1000000000.0; expected seconds above 0 and up to 1e\\+08"),
        ({"name": "lstm", "backward": 10**400}, "backward: got 1000.*; expected seconds above 0"),
        ({"name": "lstm", "backward": "0.2"}, "backward: got '0.2'"),
        ({"name": "lstm", "backward": 0.2, "speed": 2.5}, "got speed 2.5 and backward 0.2; expected one of the two"),
        ({"name": "lstm", "device": "tpu"}, "device: got 'tpu'"),
    ],
)
def test_mistakes_are_told(arguments, message):
    with pytest.raises(ConfigError, match=message):
        model_workload(**arguments)


# --- the page ---------------------------------------------------------------------------------------------------------

ROW = re.compile(r"^\| `([\w-]+)` \| (\d+) \| ([\d ]+) \| ([\d.]+) \| [^|]* \| (\d+) × [^|]* \|$", re.M)
TIMES = re.compile(r"^\| `([\w-]+)` \| ([\d.]+) \| (\d+) \| ([\d–]+) \| (\d+) \| (\d+) \|$", re.M)


def test_the_page_has_the_sizes_of_the_models():
    rows = ROW.findall(PAGE)
    assert [row[0] for row in rows] == list(MODELS)
    for name, tensors, parameters, megabytes, batch in rows:
        model, workload = MODELS[name], WORKLOADS[name]
        assert (int(tensors), int(parameters.replace(" ", ""))) == (len(workload.tensors), model.parameters)
        assert (megabytes, int(batch)) == (f"{workload.nbytes / 2**20:.1f}", model.batch)


def test_the_page_has_the_times_of_the_models():
    rows = TIMES.findall(PAGE)
    assert [row[0] for row in rows] == list(MODELS)
    for name, speed, modelled, measured, first, step in rows:
        workload = WORKLOADS[name]
        assert speed == f"{MODELS[name].speed / 1e12:.1f}"
        assert modelled == f"{backward_of(MODELLED[name]) * 1e3:.0f}"
        assert measured == str(MEASURED.get(name, "–"))
        assert (first, step) == (f"{workload.tensors[0].ready * 1e3:.0f}", f"{workload.seconds * 1e3:.0f}")


def alone_over_together(workload, intra, inter):
    """A step alone over one at 8 × 8 GPUs: rings of 8 inside and between nodes, one after the other, in one lane."""
    lane = 0.0
    for tensor in workload.tensors:
        lane = max(lane, tensor.ready) + 2 * 7 / 8 * tensor.nbytes * (8 / intra + 8 / inter)
    return workload.seconds / (lane + workload.update)


@pytest.mark.parametrize(
    "name, links, said, shown",
    [
        ("gpt2", (1.2e12, 1e11), "GPT-2, NVLink", "{:.2f}"),
        ("bert-base", (1.2e12, 1e11), "BERT-base, NVLink", "{:.2f}"),
        ("lstm", (1e11, 25e9), "LSTM, PCIe", "{:.2f}"),
        ("ugatit", (1.2e12, 1e11), "U-GAT-IT, NVLink", "{:.0f} %"),
        ("resnet101", (1e11, 25e9), "ResNet-101, PCIe", "{:.0f} %"),
        ("vgg16", (1e11, 25e9), "VGG16, PCIe", "{:.0f} %"),
    ],
)
def test_the_page_has_the_ratios_of_rings(name, links, said, shown):
    ratios = [alone_over_together(workloads[name], *links) for workloads in (MODELLED, WORKLOADS)]
    numbers = [shown.format(100 * (1 / ratio - 1) if "%" in shown else ratio) for ratio in ratios]
    assert f"{said} | {numbers[0]} | {numbers[1]} |" in PAGE
