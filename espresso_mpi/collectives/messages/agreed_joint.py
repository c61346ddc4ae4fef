"""Sums of several arrays at once over the ranks of a node, which begin with the exchange of headers.

See ``joint_sums`` for how they pass the shared window, and ``agreed`` for how the ranks agree.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from . import agreed_sums
from .agreed import AgreedSums
from .joint import JointArray
from .shared_arrays import NOWHERE


class AgreedJointSums(AgreedSums):
    """As ``AgreedSums``, of several arrays, which count as one."""

    def reduce_joint(self, header: np.ndarray, ignored: int, joint: JointArray) -> bool:
        """Show a header; if those of all members are equal, each array becomes its sum, else the arrays stay.

        Args:
            header, ignored: as of ``AgreedCopies.begin``.
            joint: equally long at members with equal headers; to be kept until the call is over.

        Returns:
            As ``AgreedCopies.begin``.
        """
        whole = self._is_whole(joint.size, joint.nbytes)
        has_room = joint.places.nbytes <= self._window.half_bytes
        place = self._readable if self._chosen((joint.size, len(joint.places)), whole or not has_room) else NOWHERE
        nothing = self._elements[:0]
        self._run = partial(agreed_sums.reduce_joint, *self._shown(header, ignored), nothing, joint.places, joint.edges,
                            place, nothing, self._elements, self._room, self._how, whole, True,
                            *self._rest())  # fmt: skip
        return self._begun()
