"""Options of a session in the name of a way: ``gradsync+dense_steps=60+dense=head*|*embedding*``."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError


def with_options(way: str) -> tuple[str, dict[str, Any]]:
    """The name of a way, and the options of its session: ``dense_steps`` and ``dense``, patterns with ``|`` between.

    Raises:
        ConfigError: another option, or a number of steps that is none.
    """
    name, *given = way.split("+")
    options: dict[str, Any] = {}
    for part in given:
        key, _, value = part.partition("=")
        if key == "dense" and value:
            options[key] = value.split("|")
        elif key == "dense_steps" and value.isdecimal():
            options[key] = int(value)
        else:
            raise ConfigError(f"{way!r}: {part!r} after a '+'; expected dense_steps=60, or dense=head*|*embedding*")
    return name, options
