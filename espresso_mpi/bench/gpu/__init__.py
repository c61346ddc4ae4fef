"""``gpu-check``: what the GPU support promises, tried on the GPU of this node.

``suite`` runs the parts and gives a result for each promise; ``kernels`` compares kernels with those of the CPU;
``beside`` times them beside other work; ``ranks`` is the program of two ranks on one GPU; ``report`` writes the result.
"""
