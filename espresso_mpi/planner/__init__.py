"""Measures a cluster, models a training step, chooses a strategy for every tensor.

So far it lists what there is to choose from, ``routes``; plans are made by hand.

This package never imports MPI: a plan can be made on a laptop.
"""

from .tree import routes

__all__ = ["routes"]
