"""Multi-rank tests fail on all ranks together, and never hang."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from verdict import *  # noqa: E402, F403
