"""``drive``: a random rotation, then the sign (DRIVE, Vargaftik et al., 2021); 1 + 32/block bits per element.

Each block is rotated by random signs and a Walsh-Hadamard transform R, renewed each step, and becomes ``S·Rᵀsgn(Rx)``
with sgn(0) = +. Unlike ``onebit``, whose error depends on how x is distributed, the error is the same for nearly all x:

- ``scale=mse``: ``S = ‖Rx‖₁/d``, an orthogonal projection: 1 - 2/π = .3634 of ``‖x‖²``, and in the mean over rotations
  never more than 1/2, which makes it a contraction for error feedback. This is the default.
- ``scale=unbiased``: ``S = ‖x‖²/‖Rx‖₁``: π/2 - 1 = .5708. For use without error feedback, where many ranks' errors
  cancel in the mean. ``eden`` says what is guaranteed, why, and what is not.
"""

from __future__ import annotations

from dataclasses import dataclass

from .eden import Rotated
from .registry import register


@register
@dataclass(frozen=True)
class Drive(Rotated):
    """Rotation and sign. Payload: 8 + n/8 + 4·ceil(n/block) bytes, and padding; see ``Rotated``."""

    name = "drive"
    examples = ("drive:block=64", "drive:scale=unbiased", "drive:block=4096")
