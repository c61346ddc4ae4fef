"""The parts of a profile, each measured with the code that sessions run.

``request`` is what is asked for; ``moves``, ``codecs``, ``calls`` and ``whole_steps`` measure, on ``inputs``;
``repeating`` repeats their passes until medians are known; ``fits`` shares seconds out over what costs them.

May import: ``synthetic_load`` of ``autotune``, and what is below ``autotune``. A new kind of measurement takes a
``Repeating``, gets a share of the time there, and is called by ``profiler.measure``.
"""
