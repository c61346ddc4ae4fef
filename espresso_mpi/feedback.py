"""The options of error feedback: what becomes of the part of a gradient that compression loses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from .errors import ConfigError

Kind = Literal["auto", "none", "plain", "ef21"]


@dataclass(frozen=True)
class Feedback:
    """The error feedback of a session. Its spec is the kind and the parameters that differ: ``plain:decay=0.9``.

    Attributes:
        kind: ``none`` drops the residual. ``plain`` adds the residual to the next gradient (Seide et al., 2014; Stich
            et al., 2018; Karimireddy et al., 2019). With ``ef21``, every rank compresses the difference between its
            gradient and what it has sent so far, and all ranks add the mean of these differences to the previous mean
            (Richtárik et al., 2021). This needs the memory of a gradient for each encode and each decode of the route.
            ``auto`` is plain if the compressor is a contraction, and none otherwise.
        decay: the share of the residual that ``plain`` keeps. Below 1, a part is lost.
        momentum: the weight η of the new gradient in the average ``v ← (1 - η)v + ηg``, which ``ef21`` compresses in
            place of the gradient (EF21-SGDM, Fatkhullin et al., 2023). 1 is plain EF21.

    Raises:
        ConfigError: a value is outside (0, 1], or the kind does not have the parameter.

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
        """The feedback for a compressor: resolves ``auto``, and checks the other kinds.

        Args:
            compressor: a Compressor.
            n: number of elements of the tensor.

        Raises:
            ConfigError: the compressor is no contraction, so the residual could grow without bound.
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
