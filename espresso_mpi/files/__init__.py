"""Files, and what commands print: written as a whole or not at all, read with a check of everything in them.

``atomic`` replaces files; ``schema`` checks JSON files against types and names file, place and value in its errors;
``json_text`` and ``json_scan`` refuse what JSON allows and this library does not; ``output`` prints tables and
progress, and refuses files that could not be written before anything is measured.

May import: ``cluster`` and ``errors``. To add a kind of file, write a frozen dataclass where its values live, and read
it by ``schema``.
"""
