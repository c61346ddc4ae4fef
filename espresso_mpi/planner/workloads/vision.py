"""VGG16, ResNet and U-GAT-IT as layers, named as torchvision and the authors' PyTorch code name them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from .layers import (
    ACTIVATION,
    NORM,
    POOL,
    SUM,
    Layer,
    NetworkStep,
    Parameters,
    Passes,
    Work,
    backwards,
    convolution,
    elementwise,
    linear,
    network_step,
    norm,
    total,
)

CLASSES = 1000

# --- VGG16 ------------------------------------------------------------------------------------------------------------

_VGG = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Channels and convolutions before each halving (Simonyan and Zisserman 2014, arXiv:1409.1556, configuration D)."""


def vgg16() -> NetworkStep:
    """VGG16 on images of 224 × 224."""
    return network_step([*_vgg_features(), *_vgg_classifier()])


def _vgg_features() -> Iterator[Layer]:
    index, inputs, side = 0, 3, 224
    for channels, count in _VGG:
        for _ in range(count):
            yield convolution(f"features.{index}", channels, inputs, 3, side, bias=True)
            yield elementwise(channels * side**2, ACTIVATION)
            index, inputs = index + 2, channels
        yield elementwise(channels * side**2, POOL)
        index, side = index + 1, side // 2


def _vgg_classifier() -> Iterator[Layer]:
    for index, outputs, inputs in ((0, 4096, 512 * 7 * 7), (3, 4096, 4096), (6, CLASSES, 4096)):
        yield linear(f"classifier.{index}", outputs, inputs)


# --- ResNet -----------------------------------------------------------------------------------------------------------

_EXPANSION = 4
"""Channels that a bottleneck block yields, as a multiple of its width."""


def resnet50() -> NetworkStep:
    """ResNet-50 on images of 224 × 224."""
    return resnet(3, 4, 6, 3)


def resnet101() -> NetworkStep:
    """ResNet-101 on images of 224 × 224."""
    return resnet(3, 4, 23, 3)


def resnet(*blocks: int) -> NetworkStep:
    """A ResNet of so many bottleneck blocks a stage (He et al. 2015, arXiv:1512.03385, table 1).

    As torchvision has it, a stage's first 3 × 3 convolution does the halving ("v1.5").
    """
    return network_step([*_stem(), *_stages(blocks), linear("fc", CLASSES, 512 * _EXPANSION)])


def _stem() -> Iterator[Layer]:
    yield convolution("conv1", 64, 3, 7, 112)
    yield norm("bn1", 64, 64 * 112**2, ACTIVATION)
    yield elementwise(64 * 112**2, POOL)


def _stages(blocks: tuple[int, ...]) -> Iterator[Layer]:
    channels, side = 64, 56
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            halves = block == 0 and stage > 0
            yield from _bottleneck(f"layer{stage + 1}.{block}", width, channels, side, 2 if halves else 1, block == 0)
            channels, side = width * _EXPANSION, side // 2 if halves else side


def _bottleneck(at: str, width: int, inputs: int, side: int, stride: int, projected: bool) -> Iterator[Layer]:
    """``side``: of its input."""
    outputs, after = width * _EXPANSION, side // stride
    yield convolution(f"{at}.conv1", width, inputs, 1, side)
    yield norm(f"{at}.bn1", width, width * side**2, ACTIVATION)
    yield convolution(f"{at}.conv2", width, width, 3, after)
    yield norm(f"{at}.bn2", width, width * after**2, ACTIVATION)
    yield convolution(f"{at}.conv3", outputs, width, 1, after)
    yield norm(f"{at}.bn3", outputs, outputs * after**2, SUM, ACTIVATION)
    if projected:
        yield convolution(f"{at}.downsample.0", outputs, inputs, 1, after)
        yield norm(f"{at}.downsample.1", outputs, outputs * after**2)


# --- U-GAT-IT ---------------------------------------------------------------------------------------------------------

_SIDE = 256
_BLOCKS = 4
_INNER = _SIDE // 4
"""Side of what is between the two downsamplings of a generator and its two upsamplings."""
_WIDTH = 256
"""Channels there."""
_DEPTHS = {"disGA": 7, "disLA": 5, "disGB": 7, "disLB": 5}
"""Layers of the global and the local discriminator of either domain."""

_MIXED_NORM: Passes = (25, 36)
"""(Ada)LIN, written out in PyTorch: two means (1 pass each), two variances (2), four operations that normalise (2), two
products with rho (2) and their sum (3), scale and shift (2); backward these twelve take three each."""


def ugatit() -> NetworkStep:
    """A training step of the full U-GAT-IT (Kim et al. 2019, arXiv:1907.10830): 2 generators, 4 discriminators.

    First the discriminators learn from a real and a generated batch, then the generators, each of which is applied
    three times: to the other domain, to go back, and to its own domain. What a generator learns in all three is summed,
    so its gradients are ready in the last of its backward passes, the first application's.
    """
    generators = {name: [*_generator(name)] for name in ("genA2B", "genB2A")}
    discriminators = {name: [*_discriminator(name, depth)] for name, depth in _DEPTHS.items()}
    generate, learn = (total(getattr(x, way) for x in generators["genA2B"]) for way in ("forward", "backward"))
    judge, teach = (total(getattr(x, way) for x in chain(*discriminators.values())) for way in ("forward", "backward"))
    nothing: Parameters = ()
    events: list[tuple[Parameters, Work]] = [(nothing, teach)]  # of the generated batch
    for layers in reversed(discriminators.values()):
        events += backwards(layers)
    # the generators' forward passes, then back through the discriminators, both own domains and both ways back
    events.append((nothing, generate * 6 + judge + teach + learn * 4))
    for layers in reversed(generators.values()):
        events += backwards(layers)
    return NetworkStep(generate * 2 + judge * 2, tuple(events))


def _generator(name: str) -> Iterator[Layer]:
    yield from _encoder(f"{name}.DownBlock")
    yield _attention(name, _WIDTH, _INNER, "weight")
    yield convolution(f"{name}.conv1x1", _WIDTH, 2 * _WIDTH, 1, _INNER, bias=True)
    yield linear(f"{name}.FC.0", _WIDTH, _WIDTH * _INNER**2, bias=False)
    yield linear(f"{name}.FC.2", _WIDTH, _WIDTH, bias=False)
    for target in ("gamma", "beta"):
        yield linear(f"{name}.{target}", _WIDTH, _WIDTH, bias=False)
    for block in range(1, _BLOCKS + 1):
        yield from _adaptive_block(f"{name}.UpBlock1_{block}")
    yield from _decoder(f"{name}.UpBlock2")


def _encoder(name: str) -> Iterator[Layer]:
    """Three convolutions, at positions 1, 5 and 9 of a sequence, then residual blocks from position 12 on."""
    for index, outputs, inputs, kernel, side in ((1, 64, 3, 7, 256), (5, 128, 64, 3, 128), (9, 256, 128, 3, 64)):
        yield convolution(f"{name}.{index}", outputs, inputs, kernel, side)
        yield elementwise(outputs * side**2, NORM, ACTIVATION)
    for block in range(12, 12 + _BLOCKS):
        for index, last in ((1, ACTIVATION), (5, SUM)):
            yield convolution(f"{name}.{block}.conv_block.{index}", _WIDTH, _WIDTH, 3, _INNER)
            yield elementwise(_WIDTH * _INNER**2, NORM, last)


def _attention(name: str, channels: int, side: int, weight: str) -> Layer:
    """The class activation map: what two pooled classifiers weigh, side by side."""
    parameters = tuple((f"{name}.{pool}.{weight}", (1, channels)) for pool in ("gap_fc", "gmp_fc"))
    return elementwise(channels * side**2, POOL, POOL, ACTIVATION, ACTIVATION, parameters=parameters)


def _adaptive_block(name: str) -> Iterator[Layer]:
    for number, last in ((1, ACTIVATION), (2, SUM)):
        yield convolution(f"{name}.conv{number}", _WIDTH, _WIDTH, 3, _INNER)
        rho: Parameters = ((f"{name}.norm{number}.rho", (1, _WIDTH, 1, 1)),)
        yield elementwise(_WIDTH * _INNER**2, _MIXED_NORM, last, parameters=rho)


def _decoder(name: str) -> Iterator[Layer]:
    for index, outputs, side in ((2, 128, 128), (7, 64, 256)):
        yield convolution(f"{name}.{index}", outputs, 2 * outputs, 3, side)
        shape = (1, outputs, 1, 1)
        parameters = tuple((f"{name}.{index + 1}.{what}", shape) for what in ("rho", "gamma", "beta"))
        yield elementwise(outputs * side**2, _MIXED_NORM, ACTIVATION, parameters=parameters)
    yield convolution(f"{name}.11", 3, 64, 7, _SIDE)


def _discriminator(name: str, depth: int) -> Iterator[Layer]:
    """Convolutions of 4 × 4 with stride 2, and a last one with stride 1; all but one are spectrally normalised."""
    inputs, outputs, side = 3, 64, _SIDE
    for number in range(depth - 1):
        side = side // 2 if number < depth - 2 else side - 1
        yield convolution(f"{name}.model.{3 * number + 1}", outputs, inputs, 4, side, bias=True, weight="weight_orig")
        yield elementwise(outputs * side**2, ACTIVATION)
        inputs, outputs = outputs, 2 * outputs
    yield _attention(name, inputs, side, "weight_orig")
    yield convolution(f"{name}.conv1x1", inputs, 2 * inputs, 1, side, bias=True)
    yield convolution(f"{name}.conv", 1, inputs, 4, side - 1, weight="weight_orig")
