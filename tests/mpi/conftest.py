"""Multi-rank tests fail on all ranks together, and never hang."""

from verdict import *  # noqa: F403
