"""The parts of a Session: what they stand on (``base``), ``checkpoints``, and ``planning``.

May import: ``autotune``, ``engine`` and what is below them. A group of methods that a Session gets is a class here,
over ``base.SessionBase``.
"""
