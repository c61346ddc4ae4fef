"""Lines of reports."""

from espresso_mpi.bench.wrapping import WIDTH, items, wrapped

ROW = "| " + "cell " * 40 + "|"


def test_prose_is_wrapped_and_nothing_else():
    text = f"- {'word ' * 40}end\n\n{ROW}\n![{'picture ' * 20}](a.png)\n```text\n{'code ' * 40}\n```\n"
    lines = wrapped(text).split("\n")
    assert lines[:2] == ["- " + " ".join(["word"] * 23), "  " + " ".join(["word"] * 17) + " end"]
    assert lines[2:] == text.split("\n")[1:]
    assert all(len(line) <= WIDTH for line in lines[:2])
    assert wrapped(wrapped(text)) == wrapped(text)


def test_items_are_what_was_wrapped():
    lines = ["- " + "one " * 50 + "end", "- two"]
    assert items(wrapped("Text:\n\n" + "\n".join(lines) + "\n")) == lines
