"""States as files: a folder with one file a rank, and a manifest that names those of the last complete save."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..collectives.messages.agreement import fingerprint, on_every_rank
from ..collectives.messages.transport import Transport
from ..errors import ConfigError, StateError
from ..files import schema
from ..files.atomic import replacing, unfinished
from ..options import Options
from .loading import USING, Loaded, load_brought
from .snapshots import VERSION, StateDict, check_version, checked, sealed, short

MANIFEST = "espresso-state.json"
_MANIFEST_BYTES = 1 << 16
_HEADER_BYTES = 1 << 28
"""Of what a state says besides its arrays: some 200 bytes per tensor."""

_FILE = re.compile(r"rank-\d{5,}-of-\d{5,}-([0-9a-f]{16})\.npz")
_LOG = logging.getLogger("espresso_mpi")


def save(transport: Transport, state: StateDict, path: str | os.PathLike[str]) -> None:
    """Write the ranks' states into a folder, one file a rank. Collective.

    The manifest is replaced when all files are there, so a save that fails leaves the one before as it was. It is
    written on every node, so that folders which nodes do not share do for the same ranks.

    Raises:
        StateError: on every rank: a file cannot be written, or the ranks are at different steps.
        RankTimeoutError: a rank did not come.
    """
    place = {"step": state["step"], "seed": state["seed"], "counters": fingerprint(state["counts"]).hex()}
    folder, found = on_every_rank(
        transport,
        lambda: Path(path).resolve(),
        StateError,
        doing=USING,
        say=lambda folder: {"place": place, "folder": str(folder), "generation": secrets.token_hex(8)},
    )
    _check_places([document["place"] for document in found], transport.describe)
    _check_folders([document["folder"] for document in found], transport)
    generation = found[0]["generation"]
    file = folder / file_name(transport.rank, transport.topology.size, generation)

    def write() -> None:
        content = sealed({**state, "generation": generation})
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(file, "wb") as out:
            _write_state(out, content)

    try:
        on_every_rank(transport, write, StateError, doing=f"{file}: cannot be written")
    except StateError:
        with contextlib.suppress(OSError):  # the file itself may be the problem
            file.unlink(missing_ok=True)
        raise
    _publish(transport, folder, generation)


def _publish(transport: Transport, folder: Path, generation: str) -> None:
    """Name a save that is complete in the manifest, and clear away the others."""
    manifest = json.dumps({"version": VERSION, "ranks": transport.topology.size, "generation": generation}) + "\n"
    first = transport.rank == transport.node[0]

    def write() -> None:
        if first:
            with replacing(folder / MANIFEST) as out:
                out.write(manifest)

    on_every_rank(transport, write, StateError, doing=f"{folder / MANIFEST}: cannot be written")
    if first:
        _remove_others(folder, generation)


def load_files(transport: Transport, options: Options, path: str | os.PathLike[str]) -> Loaded:
    """As ``load``, from a folder that ``save`` wrote; each rank reads its share of the files. Collective.

    Raises:
        StateError: on every rank, as ``load``, or if a file is missing, damaged or of another save.
        RankTimeoutError: a rank did not come.
    """
    return load_brought(transport, options, lambda: _read_share(Path(path), transport.rank, transport.topology.size))


def file_name(rank: int, ranks: int, generation: str) -> str:
    """The file of a rank in a folder of states; ``generation``: 16 hexadecimal digits that one save has in common."""
    return f"rank-{rank:05}-of-{ranks:05}-{generation}.npz"


def _check_places(places: Sequence[Mapping[str, Any]], describe: Callable[[int], str]) -> None:
    for rank, place in enumerate(places):
        for key, value in place.items():
            if value != places[0][key]:
                raise StateError(
                    f"the ranks are not at the same place: {key} is {short(places[0][key])} on {describe(0)}, "
                    f"{short(value)} on {describe(rank)}; save after the same step on every rank"
                )


def _check_folders(folders: Sequence[str], transport: Transport) -> None:
    """Refuse to save a node's ranks into different folders: none of these could be loaded."""
    for node in transport.topology.nodes:
        other = next((rank for rank in node if folders[rank] != folders[node[0]]), None)
        if other is not None:
            raise StateError(
                f"save: the path is {folders[node[0]]} on {transport.describe(node[0])}, {folders[other]} on "
                f"{transport.describe(other)}; pass the same folder on every rank: each writes a file of its own there"
            )


def _write_state(out: Any, state: StateDict) -> None:
    """A header of JSON as bytes, and the arrays by number: their keys may have characters that files cannot."""
    keys = list(state["arrays"])
    header = {**{key: value for key, value in state.items() if key != "arrays"}, "keys": keys}
    arrays = {f"array{number}": state["arrays"][key] for number, key in enumerate(keys)}
    np.savez(out, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)


def _remove_others(folder: Path, generation: str) -> None:
    """Clear away what former saves left, now that nothing names it; another rank may do so at the same time."""
    try:
        for file in list(folder.iterdir()):
            found = _FILE.fullmatch(file.name)
            if found and found[1] != generation:
                file.unlink(missing_ok=True)
            left = unfinished(file.name)
            if left is not None and (left == MANIFEST or _FILE.fullmatch(left)):
                shutil.rmtree(file, ignore_errors=True)
    except OSError as error:  # what was saved is complete
        _LOG.warning("%s: files of former saves cannot be removed: %s", folder, error)


def _read_share(folder: Path, rank: int, ranks: int) -> list[StateDict]:
    manifest = _read_manifest(folder)
    generation, count = manifest["generation"], manifest["ranks"]
    states = []
    for old in range(rank, count, ranks):
        file = folder / file_name(old, count, generation)
        states.append(checked(_read_state(file)))
        if states[-1]["rank"] != old or states[-1]["generation"] != generation:
            raise StateError(f"{file}: it is of rank {states[-1]['rank']} of another save; was it renamed?")
    return states


def _read_manifest(folder: Path) -> Mapping[str, Any]:
    file = folder / MANIFEST
    if not file.exists():
        raise StateError(f"{file}: not found; expected a folder that Session.save wrote, on a disk of this node")
    try:
        manifest = schema.load(file, lambda document: document, _MANIFEST_BYTES)
    except ConfigError as error:
        raise StateError(f"{error}; expected what Session.save wrote") from None
    if not isinstance(manifest, dict):
        raise StateError(f"{file}: got {type(manifest).__name__}; expected what Session.save wrote")
    check_version(manifest.get("version"))
    ranks, generation = manifest.get("ranks"), manifest.get("generation")
    if type(ranks) is not int or ranks < 1 or not re.fullmatch("[0-9a-f]{16}", str(generation)):
        raise StateError(f"{file}: ranks or generation are missing or damaged; expected what Session.save wrote")
    return manifest


def _read_state(file: Path) -> StateDict:
    """A state as ``state_dict`` gives it; nothing is unpickled.

    Raises:
        StateError: the file is missing or damaged.
    """
    try:
        with np.load(file, allow_pickle=False) as content:
            if content.zip.getinfo("header.npy").file_size > _HEADER_BYTES:
                raise ValueError(f"its header has more than {_HEADER_BYTES} bytes")
            header = schema.parse(content["header"].tobytes())
            arrays = {key: content[f"array{number}"] for number, key in enumerate(header.pop("keys"))}
    except FileNotFoundError:
        raise StateError(f"{file}: not found; the manifest names it: was the folder copied as a whole?") from None
    except Exception as error:  # zip, numpy and JSON raise a dozen kinds for a damaged file
        raise StateError(f"{file}: damaged, or not written by Session.save: {type(error).__name__}: {error}") from None
    return {**header, "arrays": arrays}
