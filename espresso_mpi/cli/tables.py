"""``espresso-mpi explain --program``: the table of operations of a route and a compressor."""

from __future__ import annotations

from ..collectives.data.layout import Topology
from ..collectives.messages.transport import MESSAGE_BYTES
from ..collectives.tables.describing import DescribedWays, table_of
from ..collectives.tables.operations import Code, OperationTable
from ..compressors import get
from ..errors import ConfigError
from ..files.output import show
from ..options import Options
from ..types import Route, Strategy


def main(route: str, compressor: str, elements: int, nodes: int, ranks: int, rank: int) -> None:
    """Print the operations of one rank.

    Args:
        route, compressor: as ``Session`` takes them; ``none``: a dense route.
        elements: of the tensor.
        nodes, ranks: nodes, and ranks of each.
        rank: the rank.

    Raises:
        ConfigError: there is no such rank, route or compressor, or one of the two does not go with the other.
    """
    if not 0 <= rank < nodes * ranks:
        raise ConfigError(f"--rank {rank} of {nodes} x {ranks} ranks; expected a number from 0 to {nodes * ranks - 1}")
    if elements < 1:
        raise ConfigError(f"--elements {elements}; expected at least 1")
    topology = Topology(tuple(tuple(range(node * ranks, (node + 1) * ranks)) for node in range(nodes)))
    strategy = Strategy(compressor, Route.parse(route))
    method = None if compressor == "none" else get(compressor).shaped((elements,)).at(0)
    ways = DescribedWays(topology, rank, Options.window_bytes, MESSAGE_BYTES)
    table = table_of(ways, strategy.route, method, elements)
    title = f"{route}, {compressor}, {elements} elements, rank {rank} of {topology}"
    if isinstance(table, str):
        print(f"{title}: Python: {table}")
        return
    show(title, ("", "operation", "what", "kernel"), rows_of(table), ("operation", "what", "kernel"))


def rows_of(table: OperationTable) -> list[tuple[str, str, str, str]]:
    """Number, name, operands and kernel of every operation; of Python stages, what they do."""
    return [
        (
            str(number),
            operation.code.name.lower(),
            table.stages[operation.tensor].what if operation.code == Code.PYTHON else str(operation),
            operation.call.entry.name if operation.call is not None else "",
        )
        for number, operation in enumerate(table.operations)
    ]
