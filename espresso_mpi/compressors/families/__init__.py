"""Classes that several methods share: one module for a family, which chooses between its CPU and its GPU kernels.

May import: ``compressors.kernels``, ``base``, ``checks``, ``context``, ``schedule``; not the methods. GPU kernels are
imported where they are called, since numba.cuda takes long to load. A family is added when a second method needs its
first part.
"""
