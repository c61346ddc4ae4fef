"""`espresso-mpi demo`: the training benchmark, on an emulated cluster if this node can have one."""

from importlib.util import find_spec
from pathlib import Path

from espresso_mpi.cluster import lab, launch

NODES, RANKS, RATE = 2, 2, "100mbit"
TIME_LIMIT_S = 600.0
OUTPUT = Path("out")


def main() -> int:
    """Runs the demo, says where it runs and why, and returns the job's exit status."""
    lacking = lab.problems()
    if not lacking:
        print(f"demo: {NODES} emulated nodes with {RANKS} ranks each, links of {RATE}", flush=True)
        return lab.run(_command(), nodes=NODES, ranks=RANKS, rate=RATE, timeout=TIME_LIMIT_S)
    print("demo: no emulated cluster, because the lab cannot run here:", flush=True)
    for problem in lacking:
        print(f"  - {problem}", flush=True)
    ranks = max(2, min(4, launch.cores()))
    print(
        f"demo: {ranks} ranks on this node instead; without a slow network compression gains little",
        flush=True,
    )
    return launch.run(_command(), ranks, TIME_LIMIT_S)


def _command() -> tuple[str, ...]:
    """The training benchmark as it is, its results in OUTPUT; the plot needs matplotlib."""
    OUTPUT.mkdir(exist_ok=True)
    plot = ("--plot", str(OUTPUT / "demo.png")) if find_spec("matplotlib") else ()
    return ("python", "-m", "espresso_mpi", "bench", "train", "--json", str(OUTPUT / "demo.json"), *plot)
