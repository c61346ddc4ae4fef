"""Models and clusters that come with the library.

- ``models``: the models, by name.
- ``language``, ``vision``, ``layers``: the layers of these models.
- ``measured``: measured lengths of backward passes.
- ``clusters``: clusters that are described instead of measured, such as the testbeds of the paper.

May import: ``planner.model``. To add a model, describe its layers in ``language`` or ``vision`` and its measured times
in ``measured``, and name it in ``models.MODELS``. A cluster goes into ``clusters.TESTBEDS``.
"""
