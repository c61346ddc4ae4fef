"""The measurements that make a profile. They run the code that sessions run.

- ``request``: says what to measure. It is the same on every rank.
- ``repeating``: repeats passes on one clock until their medians are known.
- ``inputs``: makes the arrays.
- ``moves``: measures collectives as steps of whole routes.
- ``codecs``: measures encodes, decodes, and copies between host and GPU.
- ``calls``: measures what a call takes beyond its steps.
- ``whole_steps``: measures what a training step takes beyond its operations.
- ``fits``: explains measured seconds by costs that are not negative.

May import: ``synthetic_load`` of ``autotune``, and the layers below ``autotune``. A new measurement takes a
``Repeating``, gets a share of its time there, and is called by ``profiler.measure``.
"""
