"""Every block of code and every command of the pages runs, or says why it cannot (see ``doc_blocks``)."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest
from doc_blocks import DOCUMENTED, LANGUAGES, PAGES, ROOT, STARTS_RANKS, blocks
from rank_jobs import run_job

LIMIT = 900
"""Seconds for the job of all pages; with empty caches it compiles most kernels, beside other tests."""
pytestmark = pytest.mark.timeout(LIMIT + 60)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder of one job on two ranks that has run all pages, and what went wrong by page."""
    folder = tmp_path_factory.mktemp("pages")
    done = run_job("-m", "mpi4py", ROOT / "tests" / "doc_job.py", folder, limit=LIMIT)
    results = folder / "problems.json"
    assert done.returncode == 0 and results.exists(), done.stdout + done.stderr
    return folder, json.loads(results.read_text())


def runnable(page):
    return [block for block in blocks(page) if block.runs]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_language_and_a_reason_if_it_does_not_run(page):
    for block in blocks(page):
        where = f"{page}:{block.line}"
        assert block.language in (*LANGUAGES, "hidden"), f"{where}: language {block.language!r}"
        assert block.marks.get("not run") != "", f"{where}: not run, but no reason"
        assert block.language != "console" or block.commands, f"{where}: a console without a line that begins with $"


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)])
def test_the_blocks_of_a_page_run(job, page):
    _, problems = job
    assert problems[page] is None, problems[page]


def test_the_public_names_have_examples():
    assert {"Session", "sync", "Session.push", "compressors.get", "planner.plan", "optim.Clan"} <= set(DOCUMENTED)
    assert not [name for name, value in DOCUMENTED.items() if "Example:\n" not in (value.__doc__ or "")]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_example_of_a_public_name_runs(job, name):
    _, problems = job
    assert problems[name] is None, problems[name]


def jobs_of_pages():
    commands = [(page, c) for page in PAGES for block in runnable(page) for c in block.commands]
    return [(page, c) for page, c in commands if shlex.split(c)[1] in STARTS_RANKS]


@pytest.mark.parametrize(("page", "command"), jobs_of_pages())
def test_a_command_that_starts_ranks_runs(job, page, command):
    folder, _ = job
    argv = [sys.executable, "-m", "espresso_mpi", *shlex.split(command)[1:]]
    done = subprocess.run(argv, cwd=folder / page.replace("/", "-"), capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", [*PAGES, "BENCHMARKS.md", "CHANGELOG.md"])
def test_no_line_is_longer_than_120(page):
    lines = enumerate((ROOT / page).read_text().splitlines(), 1)
    assert not [number for number, line in lines if len(line) > 120 and not line.lstrip().startswith("|")]
