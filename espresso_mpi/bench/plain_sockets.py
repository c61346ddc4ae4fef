"""The bytes of a dense sum through plain sockets, by two threads of each rank: what overlap can reach at best.

Each rank sends to the next one and receives from the one before, at once. The threads block in the kernel until a long
piece has passed, and need the interpreter lock between two pieces only: nothing polls, negotiates or adds.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

from ..errors import ConfigError

_PIECE = 1 << 20
"""Bytes that a thread sends or receives without the interpreter lock."""

_PATIENCE = 30.0
"""Seconds that a connection may take."""


class PlainSockets:
    """A ring of TCP connections. Collective.

    Args:
        comm: of at least two ranks.

    Raises:
        ConfigError: on every rank: there is one rank, or a rank cannot reach the next one by its hostname.
    """

    def __init__(self, comm: Any) -> None:
        if comm.size < 2:
            raise ConfigError("plain sockets: there is one rank, which sends nothing; leave out --sockets")
        self._comm, self._threads, self._errors = comm, list[threading.Thread](), list[OSError]()
        self._to, self._from, problem = _ring(comm)
        told = [text for text in comm.allgather(problem) if text]
        if told:
            self.close()
            raise ConfigError(f"plain sockets: {told[0]}; leave out --sockets")

    def start(self, nbytes: int) -> None:
        """Begin to send and receive as many bytes as a rank does in a dense sum of ``nbytes``, and return at once."""
        self._errors.clear()
        share = 2 * nbytes * (self._comm.size - 1) // self._comm.size
        self._threads = [threading.Thread(target=self._work, args=(act, share)) for act in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Wait until all bytes were sent and received."""
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def exchange(self, nbytes: int) -> None:
        """``start``, and ``wait``."""
        self.start(nbytes)
        self.wait()

    def close(self) -> None:
        """Close the connections."""
        self._to.close()
        self._from.close()

    def _work(self, act: Any, nbytes: int) -> None:
        try:
            act(nbytes)
        except OSError as error:
            self._errors.append(error)

    def _send(self, nbytes: int) -> None:
        piece = memoryview(bytes(_PIECE))
        while nbytes:
            self._to.sendall(piece[: min(nbytes, _PIECE)])
            nbytes -= min(nbytes, _PIECE)

    def _receive(self, nbytes: int) -> None:
        piece = memoryview(bytearray(_PIECE))
        while nbytes:
            got = self._from.recv_into(piece, min(nbytes, _PIECE), socket.MSG_WAITALL)
            if not got:
                raise ConnectionError("the rank before has closed its socket")
            nbytes -= got


def _ring(comm: Any) -> tuple[socket.socket, socket.socket, str]:
    """Connections to the next rank and from the one before, and what was wrong. Collective."""
    listening = socket.socket()
    listening.settimeout(_PATIENCE)
    problem, host = "", ""
    try:
        host = socket.gethostbyname(socket.gethostname())
        listening.bind((host, 0))
        listening.listen(1)
    except OSError as error:
        problem = f"rank {comm.rank} cannot listen on {host or socket.gethostname()}: {error}"
    address = listening.getsockname() if not problem else None
    addresses = comm.allgather(address)
    to, before = socket.socket(), socket.socket()
    if None in addresses:
        listening.close()
        return to, before, problem
    try:
        to = socket.create_connection(addresses[(comm.rank + 1) % comm.size], timeout=_PATIENCE)
        before, _ = listening.accept()
        to.settimeout(None)
        before.settimeout(None)
    except OSError as error:
        problem = f"rank {comm.rank} cannot connect to its neighbours: {error}"
    finally:
        listening.close()
    return to, before, problem
