"""Stores the payloads of compressors, so that the wire format cannot change unnoticed.

    python tests/make_fixtures.py                adds the specs that are not stored yet
    python tests/make_fixtures.py topk qsgd      stores these methods anew: their format changed on purpose

``test_fixtures.py`` compares. The file holds for each spec and input the payload and a digest of what it decodes
to; a long payload is stored as its digest as well.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import law_tools
import numpy as np

from espresso_mpi.compressors import Compressor, Context, get, names

STORED = Path(__file__).with_name("fixtures") / "payloads.json"
COMMAND = "python tests/make_fixtures.py"
_HEX_BYTES = 400


def inputs() -> Iterator[tuple[str, np.ndarray]]:
    """Names and values; made from integers, so that they are the same with every version of numpy."""
    yield "one", np.array([-1.5], np.float32)
    yield "67", _values(67)
    yield "67 on five scales", np.ldexp(_values(67), np.arange(67) % 5 * 13 - 26)
    yield "3001", _values(3001)


def _values(n: int) -> np.ndarray:
    """Bell-shaped values: sums of four 16-bit words of splitmix64, less their mean."""
    h = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words = (h ^ (h >> np.uint64(31)))[:, None] >> np.array([0, 16, 32, 48], np.uint64) & np.uint64(0xFFFF)
    return ((words.astype(np.int64).sum(axis=1) - 131070) / 32768).astype(np.float32)


def made(spec: str) -> dict[str, list[str]]:
    """What is stored for a spec: per input the payload and the digest of the decoded values."""
    compressor, entries = get(spec).at(None), {}
    for name, x in inputs():
        context = Context(law_tools.KEY, law_tools.SHARED)
        entries[name] = _step(compressor, x, context)
        if context.state:  # what it kept makes the next payload another one
            entries[f"{name}, next step"] = _step(compressor, x, context)
    return entries


def _step(compressor: Compressor, x: np.ndarray, context: Context) -> list[str]:
    payload, out = np.empty(compressor.nbytes(x.size), np.uint8), np.empty_like(x)
    compressor.encode(x, payload, None, context)
    compressor.update_from_aggregate(payload, x.size, context)
    compressor.decode(payload, out, context)
    long = payload.size > _HEX_BYTES
    return [_digest(payload) if long else payload.tobytes().hex(), _digest(out + np.float32(0))]


def _digest(array: np.ndarray) -> str:
    return "sha256 " + hashlib.sha256(array.tobytes()).hexdigest()[:32]


def registered() -> list[str]:
    return [spec for name in names(installed=False) for spec in law_tools.specs_of(name)]


def stored() -> dict[str, dict[str, list[str]]]:
    return json.loads(STORED.read_text()) if STORED.exists() else {}


def main(again: list[str]) -> None:
    """Store what is missing, and the methods named."""
    kept = {spec: entries for spec, entries in stored().items() if get(spec).name not in again}
    added = {spec: made(spec) for spec in registered() if spec not in kept}
    STORED.parent.mkdir(exist_ok=True)
    STORED.write_text(json.dumps(dict(sorted((kept | added).items())), indent=1) + "\n")
    print(f"{STORED}: {len(added)} stored ({', '.join(added) or 'none'}), {len(kept)} as before")


if __name__ == "__main__":
    main(sys.argv[1:])
