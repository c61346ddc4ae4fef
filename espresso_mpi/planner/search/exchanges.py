"""The compiled loop that improves a choice by trying, in the orders ``fifo`` and ``priority``."""

from __future__ import annotations

from espresso_mpi.files.compiled import compiled

from ..model.dispatch import served


@compiled
def try_all(choice, candidates, errors, limit, tries, tables, by_tensor):  # type: ignore[no-untyped-def]
    """Exchange one option, and where that no longer helps two, until nothing helps or ``tries`` are used up; returns F.

    Args:
        candidates: int64 (tensors, most), options to try, -1 none.
        errors, limit: the sum of a choice's errors stays at most the limit.
    """
    best = served(choice, tables, by_tensor)[0]
    spent = 0.0
    for tensor in range(choice.size):
        spent += errors[choice[tensor]]
    improved = True
    while improved and tries > 0:
        improved = False
        for one in range(choice.size):
            for a in range(candidates.shape[1]):
                option, old = candidates[one, a], choice[one]
                if option < 0 or option == old or tries <= 0 or spent + errors[option] - errors[old] > limit:
                    continue
                choice[one] = option
                tries -= 1
                time = served(choice, tables, by_tensor)[0]
                if time < best:
                    best, improved = time, True
                    spent += errors[option] - errors[old]
                else:
                    choice[one] = old
        if improved:
            continue
        for one in range(choice.size):
            for other in range(one + 1, choice.size):
                for a in range(candidates.shape[1]):
                    for b in range(candidates.shape[1]):
                        option, then = candidates[one, a], candidates[other, b]
                        old, was = choice[one], choice[other]
                        if option < 0 or then < 0 or option == old or then == was or tries <= 0:
                            continue
                        more = errors[option] + errors[then] - errors[old] - errors[was]
                        if spent + more > limit:
                            continue
                        choice[one], choice[other] = option, then
                        tries -= 1
                        time = served(choice, tables, by_tensor)[0]
                        if time < best:
                            best, improved = time, True
                            spent += more
                        else:
                            choice[one], choice[other] = old, was
    return best
