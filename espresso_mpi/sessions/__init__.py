"""The parts of a Session: their base class (``base``), ``checkpoints``, and ``planning``.

May import: ``autotune``, ``engine`` and what is below them. Each group of methods of a Session is a class here,
derived from ``base.SessionBase``.
"""
