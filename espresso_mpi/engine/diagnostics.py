"""Diagnostics: the errors that follow from a negotiation round.

Every rank derives them from the same messages, so the errors and their texts are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, EspressoError, GradientError, MismatchError, PlanError, RankTimeoutError, StateError

Describe = Callable[[int], str]
"""Returns the text for a rank."""

CallKey = tuple[str, str]
"""Identifies the matching calls of different ranks: ("sync", ""), ("push", tensor) or ("close", "")."""

_KINDS = {cls.__name__: cls for cls in (GradientError, PlanError, ConfigError, StateError, MismatchError)}


OF_GRADIENTS = ("sync", "push")
"""Calls whose tensors travel as the options of the session, or its plan, say."""


@dataclass(frozen=True)
class Content:
    """What must be equal in the matching calls of all ranks.

    Attributes:
        key: identifies matching calls.
        priority: of the call.
        tensors: (name, type and shape, device) of each.
        digest: a digest of the tensors and how they travel.
    """

    key: CallKey
    priority: float
    tensors: tuple[tuple[str, str, str], ...]
    digest: str

    @classmethod
    def read(cls, note: Mapping[str, Any]) -> Content:
        """From the note of the rank that announced it."""
        tensors = tuple((t[0], t[1], t[2]) for t in note["tensors"])
        return cls((note["call"][0], note["call"][1]), note["priority"], tensors, note["digest"])

    def note(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "call": list(self.key),
            "priority": self.priority,
            "tensors": [list(t) for t in self.tensors],
            "digest": self.digest,
        }


def described(key: CallKey) -> str:
    """The text for a call."""
    return f"{key[0]}({key[1]!r})" if key[1] else key[0]


def problem_error(said: Sequence[tuple[int, Sequence[str]]], size: int, describe: Describe) -> EspressoError:
    """One error from the problems of several ranks: (rank, (name of the error, text))."""
    kind, _ = said[0][1]
    return _KINDS.get(kind, GradientError)(grouped([(rank, text) for rank, (_, text) in said], size, describe))


def grouped(said: Sequence[tuple[int, str]], size: int, describe: Describe) -> str:
    """One clause for each different text, with the ranks that it comes from."""
    ranks: dict[str, list[int]] = {}
    for rank, text in said:
        ranks.setdefault(text, []).append(rank)
    return "; ".join(
        f"{'all ranks' if len(who) == size > 1 else ', '.join(map(describe, who))}: {text}"
        for text, who in ranks.items()
    )


def conflict_error(contents: Mapping[int, Content], describe: Describe) -> MismatchError:
    """The error for matching calls whose content, by rank, differs."""
    (first_rank, first), *others = sorted(contents.items())
    for rank, content in others:
        if content.tensors == first.tensors and content.digest != first.digest and first.key[0] not in OF_GRADIENTS:
            return MismatchError(
                f"ranks disagree about the arguments of {described(first.key)}: those of "
                f"{describe(first_rank)} are other than those of {describe(rank)}; pass the same op, root, compressor, "
                f"route and feedback on every rank"
            )
        if content.digest != first.digest or content.tensors != first.tensors:
            return MismatchError(_tensors_text(first.tensors, content.tensors, describe(first_rank), describe(rank)))
        if content.priority != first.priority:
            return MismatchError(
                f"ranks disagree about the priority of {described(first.key)}: {describe(first_rank)} has "
                f"{first.priority:g}, {describe(rank)} has {content.priority:g}; pass the same"
            )
    raise AssertionError("the calls are equal")


def _tensors_text(first: Sequence[Any], mine: Sequence[Any], one: str, other: str) -> str:
    for position, (a, b) in enumerate(zip(first, mine)):
        if a != b:
            return (
                f"ranks disagree about tensor number {position + 1}: {one} has {a[0]!r} {a[1]} on {a[2]}, "
                f"{other} has {b[0]!r} {b[1]} on {b[2]}; pass the same tensors in the same order on every rank"
            )
    if len(first) == len(mine):
        return (
            f"ranks disagree about the plan: {one} and {other} bring the same tensors, and send them by different "
            f"plans; call follow(), and begin and end record_workload(), between the same calls on every rank"
        )
    longer, who = (first, one) if len(first) > len(mine) else (mine, other)
    extra = longer[min(len(first), len(mine))][0]
    return (
        f"ranks disagree about the tensors: {one} has {len(first)}, {other} has {len(mine)}; "
        f"{extra!r} is only on {who}; pass the same tensors on every rank (None where a rank has no gradient is "
        f"allowed only if all have none)"
    )


def stuck_error(waiting: Mapping[int, Sequence[CallKey]], missing: Sequence[str], describe: Describe) -> MismatchError:
    """The error for a state without progress: every rank waits for calls that not all ranks have made."""
    parts = [
        f"{describe(rank)} waits in {', '.join(map(described, calls[:5]))}{' and others' if len(calls) > 5 else ''}"
        for rank, calls in waiting.items()
        if calls
    ]
    parts += [f"the plan's group misses {name!r}" for name in missing]
    return MismatchError(
        f"ranks wait for each other in different calls: {'; '.join(parts)}; make the same calls on every rank"
    )


def absent_error(seconds: float, what: str, missing: Sequence[int], describe: Describe) -> RankTimeoutError:
    """The error for ranks that make other calls, but not this one."""
    return RankTimeoutError(
        f"waited {seconds:g} s for {', '.join(map(describe, missing))} in {what}; every rank must call it; "
        f"see what that rank is doing, or raise timeout= if it is only slow"
    )


def non_finite_text(content: Content, bad: Mapping[int, Mapping[str, str]], describe: Describe) -> str:
    """The text for values of a call that cannot be summed; ``bad``: by rank and position of the tensor."""
    return "; ".join(
        f"{describe(rank)}: {content.tensors[int(position)][0]!r} {text}"
        for rank, texts in sorted(bad.items())
        for position, text in texts.items()
    )


def agree_on_options(notes: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise an error if a rank's options are invalid, or if ranks disagree; ``notes``: (hostname, note) of each."""

    def name(rank: int) -> str:
        return f"rank {rank} ({notes[rank][0]})"

    said = [(rank, note["problem"]) for rank, (_, note) in enumerate(notes) if note["problem"]]
    if said:
        raise ConfigError(grouped(said, len(notes), name))
    options = [note["options"] for _, note in notes]
    if any(mine != options[0] for mine in options):
        raise MismatchError(_options_text(options, name))


def _options_text(options: Sequence[Mapping[str, Any]], name: Describe) -> str:
    for rank, mine in enumerate(options):
        for key, value in mine.items():
            if value != options[0][key]:
                first = options[0][key]
                return f"ranks disagree about {key}: {name(0)} has {first!r}, {name(rank)} has {value!r}; pass the same"
    return "ranks disagree about the options; pass the same"
