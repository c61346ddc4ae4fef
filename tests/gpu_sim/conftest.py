"""The GPU path of a session where there is no GPU: numba's simulator runs the kernels, host memory plays the GPU's."""

import cuda_simulator  # chooses the simulator, before numba is imported
from verdict import *  # noqa: F403

cuda_simulator.install()
