"""The workloads of ``bench accuracy``: a network, its data, its optimizer and its learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ConfigError
from . import text
from .datasets import Characters, Dataset, Digits
from .gpt_shape import Shape
from .optimizer_runs import RATES

if TYPE_CHECKING:  # needs torch, which only a run needs
    from torch import nn

CLASSES = 10
"""Of the digits."""


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        optimizer: "adamw" or "sgd" with momentum.
        rates: peak learning rates, by the optimizers of ``optimizer_ways.BASES``.
        batch: examples of all ranks together in a step.
        width, layers: the usual sizes of the network.
        unit: what a loss is of, in bits.
    """

    optimizer: str
    rates: Mapping[str, float]
    batch: int
    width: int
    layers: int
    unit: str


WORKLOADS = {
    "gpt": Workload("adamw", RATES, 8, 256, 4, "bits per character"),
    "lstm": Workload("adamw", {**RATES, "adamw": 6e-3, "onebit-adam": 6e-3, "zero-one-adam": 6e-3,
                               "diloco": 6e-3, "streaming": 6e-3, "sparseloco": 6e-3, "ef21": 6e-3},
                     8, 256, 2, "bits per character"),
    "resnet": Workload("sgd", {**RATES, "sgd": 0.02, "momentum-sgd": 0.02, "diloco": 0.02, "streaming": 0.02,
                               "sparseloco": 0.02, "ef21": 0.02}, 64, 32, 2, "bits per image"),
}  # fmt: skip
"""A GPT and an LSTM on text, under AdamW; a residual network on images of digits, under SGD with momentum. Rates were
chosen with fp32, and not again for each method; that of ``muloco`` on the GPT alone. Muon finds no matrices in the
residual network."""


def workload_of(name: str) -> Workload:
    """The workload of a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"--workload {name!r}; expected one of {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def dataset(name: str) -> Dataset:
    """The data of a workload.

    Raises:
        CorpusError: this Python has no training text.
        ConfigError: scikit-learn, which carries the images, is not installed.
    """
    return Digits() if name == "resnet" else Characters(text.load(), Shape().context)


def network(name: str, width: int, layers: int, seed: int) -> nn.Module:
    """The network of a workload; called with inputs and targets it returns the mean loss in nats. Needs torch.

    Raises:
        ConfigError: a width that the network cannot have.
    """
    from . import gpt, networks

    if name == "gpt":
        return gpt.GPT(Shape(width=width, layers=layers), seed)
    if name == "lstm":
        return networks.CharLSTM(text.ALPHABET, width, layers, seed)
    if width % 4:
        raise ConfigError(f"--width {width}; expected a multiple of 4, the groups of its norms")
    return networks.ImageResNet(CLASSES, width, layers, seed)
