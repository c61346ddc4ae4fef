"""Reports of which only some sections are measured anew."""

from espresso_mpi.bench.kept_sections import LOSSES, joined

FORMER = f"""# Benchmarks

Old head.

{LOSSES}

What they are.

- one node, against fp32: old.
- one node, against fp16: old.
- lab, against fp32: kept.

## Sync: one node

old

### Part of it

old

## GPU: H100

kept
"""

NEW = f"""# Benchmarks

New head.

{LOSSES}

What they are now.

- one node, against fp32: new.

## Sync: one node

new

## Sync: two nodes

new
"""


def test_only_sections_measured_anew_change():
    assert (
        joined(FORMER, NEW)
        == f"""# Benchmarks

New head.

{LOSSES}

What they are now.

- one node, against fp32: new.
- lab, against fp32: kept.

## Sync: one node

new

## Sync: two nodes

new

## GPU: H100

kept
"""
    )


def test_losses_stay_where_no_synchronisation_was_measured():
    without = "# Benchmarks\n\nOld head.\n\n## GPU: H100\n\nnew\n"
    assert joined(FORMER, without) == FORMER.replace("kept\n", "new\n")


def test_the_same_report_twice_is_the_same():
    assert joined(FORMER, FORMER) == FORMER


def test_a_new_section_follows_those_of_its_kind():
    head, *_ = FORMER.partition(LOSSES)
    assert joined(FORMER, head + "## GPU: H200\n\nnew\n") == FORMER + "\n## GPU: H200\n\nnew\n"
