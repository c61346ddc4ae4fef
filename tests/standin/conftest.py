"""The GPU path of a session where there is no GPU: numba's simulator runs the kernels, host memory plays the GPU's."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "serial")]

import cuda_simulator  # chooses the simulator, before numba is imported

from verdict import *  # noqa: F403

cuda_simulator.install()
