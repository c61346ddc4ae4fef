"""A compressor for tests of sessions: linear, with a summary, memory of its own, and no GPU kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from espresso_mpi.compressors import Compressor, Summary


@dataclass(frozen=True)
class Agreed(Compressor):
    """Integers with a scale that all ranks agree on: the least that a linear compressor with a summary can be."""

    top: int = 1000
    name = "test-agreed"
    common = True
    element = "int16"

    def nbytes(self, n):
        return 16 + 2 * n

    def header(self, n):
        return 16

    def contraction(self, n):
        return 0.5

    def summary(self, n):
        return Summary(1, "max")

    def _summarise_cpu(self, x, summary, residual, context):
        if residual is not None:
            residual += x
        summary[0] = np.abs(x if residual is None else residual).max()

    def _encode_cpu(self, x, payload, residual, context):
        scale = context.summary[0] / np.float32(self.top)
        codes = np.rint((x if residual is None else residual) / scale)
        payload[:16] = 0
        payload[:16].view(np.float32)[0] = scale
        payload[16:].view(np.int16)[...] = codes
        context.kept("times", 1, x)[0] += 1
        if residual is not None:
            residual -= codes.astype(np.float32) * scale

    def update_from_aggregate(self, payload, n, context):
        context.kept("learned", n, np.empty(0, np.float32))[...] = payload[16:].view(np.int16)

    def _decode_cpu(self, payload, out, add, context):
        decoded = payload[16:].view(np.int16) * payload[:16].view(np.float32)[0]
        out[...] = out + decoded if add else decoded
