"""Error feedback: what becomes of the part of a gradient that compression loses. A value that a session is given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from .errors import ConfigError

Kind = Literal["auto", "none", "plain", "ef21"]


@dataclass(frozen=True)
class Feedback:
    """How losses are fed back. Spelled by its kind and what is not the default: ``plain:decay=0.9``.

    Attributes:
        kind: ``none``: what is lost is lost. ``plain`` (Seide et al., 2014; Stich et al., 2018; Karimireddy et al.,
            2019): it is added to the next gradient. ``ef21`` (Richtárik et al., 2021): every rank compresses how its
            gradient differs from what the others hold of it, and all add the mean of these differences to what they
            hold, which takes a gradient's memory once more for each encode and each decode of the route. ``auto``:
            plain where the compressor is a contraction, else none.
        decay: of ``plain``: the share of the residual that is kept; below 1 something is lost for good.
        momentum: of ``ef21``: weight η of the new gradient in the average ``v ← (1 - η)v + ηg`` that is compressed in
            its place (EF21-SGDM, Fatkhullin et al., 2023); 1 is plain EF21.

    Raises:
        ConfigError: a value outside (0, 1], or a parameter that the kind does not have.

    Example:
        >>> espresso_mpi.Feedback.of("plain:decay=0.9")
        Feedback(kind='plain', decay=0.9, momentum=1.0)
    """

    kind: Kind = "auto"
    decay: float = 1.0
    momentum: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("auto", "none", "plain", "ef21"):
            raise ConfigError(f"feedback={self.kind!r}; expected auto, none, plain or ef21")
        for name, value, owner in (("decay", self.decay, "plain"), ("momentum", self.momentum, "ef21")):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 < value <= 1:
                raise ConfigError(f"feedback: {name}={value!r}; expected a number above 0 and at most 1")
            if value != 1 and self.kind != owner:
                raise ConfigError(f"feedback: {name}= belongs to {owner}, not to {self.kind}")

    @classmethod
    def of(cls, value: Any) -> Feedback:
        """A Feedback from itself, a spec, or a bool (True: auto, False: none).

        Raises:
            ConfigError: the value is none of these.
        """
        if isinstance(value, Feedback):
            return value
        if isinstance(value, bool):
            return cls("auto" if value else "none")
        if not isinstance(value, str):
            raise ConfigError(f"feedback={value!r}; expected auto, none, plain, ef21 or a bool")
        kind, _, text = value.partition(":")
        parameters: dict[str, float] = {}
        for item in filter(None, text.split(",")):
            name, _, number = item.partition("=")
            try:
                parameters[name.strip()] = float(number)
            except ValueError:
                raise ConfigError(
                    f"feedback: cannot read {item!r}; expected decay=<float> or momentum=<float>"
                ) from None
        if not set(parameters) <= {"decay", "momentum"}:
            raise ConfigError(f"feedback={value!r}; plain takes decay=<float>, ef21 takes momentum=<float>")
        return cls(kind.strip(), **parameters)  # type: ignore[arg-type]

    def resolved(self, compressor: Any, n: int) -> Feedback:
        """What ``auto`` stands for with a compressor, and whether the rest goes with it.

        Args:
            compressor: a Compressor; n: elements of the tensor.

        Raises:
            ConfigError: the residual would grow without bound: the compressor is no contraction.
        """
        contracts = all(stage.contraction(max(n, 1)) > 0 for stage in compressor.stages())
        if self.kind == "auto":
            return Feedback("plain" if contracts else "none")
        if self.kind != "none" and not contracts:
            raise ConfigError(
                f"feedback={str(self)!r} with compressor {str(compressor)!r}: it promises no contraction, so what is "
                f"fed back may grow without bound; {_cure(compressor)}"
            )
        if self.kind == "ef21" and compressor.second_pass() != compressor:
            raise ConfigError(
                f"feedback={str(self)!r} with compressor {str(compressor)!r}: it has a momentum of its own, which "
                f"would run away with the differences that ef21 compresses; use feedback='plain' or another compressor"
            )
        return self

    def __str__(self) -> str:
        changed = [f"{k}={v!r}" for k, v in (("decay", self.decay), ("momentum", self.momentum)) if v != 1]
        return self.kind + (":" + ",".join(changed) if changed else "")


AUTO = Feedback()
NO_FEEDBACK = Feedback("none")


def _cure(compressor: Any) -> str:
    if hasattr(compressor, "scaled"):
        other = replace(compressor, scaled=not compressor.scaled)
        if other.at(None).contraction(1 << 20) > 0:
            return f"use {str(other)!r}, which contracts, or feedback='none'"
    return "use feedback='none'"
