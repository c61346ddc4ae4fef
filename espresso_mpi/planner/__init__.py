"""Measures a cluster, models a training step, chooses a strategy for every tensor.

Empty so far: plans are made by hand.

This package never imports MPI: a plan can be made on a laptop.
"""
