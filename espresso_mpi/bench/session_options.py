"""Options of a session in the name of a way: ``gradsync+dense_steps=60+dense=head*|*embedding*``."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError

_OF_ALL = ("route", "feedback")
"""Options that also the sessions of optimizers can have in the names of ways."""


def with_options(way: str) -> tuple[str, dict[str, Any]]:
    """The name of a way, and the options of its session, which averages gradients.

    These are ``dense_steps`` and ``dense``, patterns with ``|`` between, and those of ``for_optimizer``.

    Raises:
        ConfigError: another option, or a number of steps that is none.
    """
    named, options = for_optimizer(way)
    name, *given = named.split("+")
    for part in given:
        key, _, value = part.partition("=")
        if key == "dense" and value:
            options[key] = tuple(value.split("|"))
        elif key == "dense_steps" and value.isdecimal():
            options[key] = int(value)
        else:
            raise ConfigError(
                f"{way!r}: {part!r} after a '+'; expected dense_steps=60, dense=head*|*embedding*, feedback=none, "
                "or route=flat-allgather"
            )
    return name, options


def for_optimizer(way: str) -> tuple[str, dict[str, Any]]:
    """The name of a way without the ``route`` and the ``feedback`` of its session, and these.

    Raises:
        ConfigError: one of them comes twice, or has no value.
    """
    parts = [part.partition("=") for part in way.split("+")]
    given = [(key, value) for key, _, value in parts if key in _OF_ALL]
    options: dict[str, Any] = dict(given)
    if len(options) < len(given) or not all(options.values()):
        raise ConfigError(f"{way!r}: expected at most one route=… and one feedback=…, with a value each")
    return "+".join("".join(part) for part in parts if part[0] not in options), options
