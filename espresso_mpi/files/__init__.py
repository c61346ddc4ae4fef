"""Files, and the output of commands. Files are written as a whole or not at all, and everything in them is checked.

- ``atomic``: replaces files as a whole.
- ``schema``: checks JSON files against types. Its errors name the file, the place and the value.
- ``json_text``, ``json_scan``: refuse what JSON allows and this library does not.
- ``compiled``: keeps compiled functions on disk.
- ``sources``: a digest of the sources of a function, in the name under which it is kept.
- ``one_process``: a lock among processes, so that one process compiles while the others wait.
- ``output``: prints tables and progress, and refuses output files that cannot be written before a measurement begins.

May import: ``cluster`` and ``errors``. To add a kind of file, write a frozen dataclass where its values live, and read
it by ``schema``.
"""
