"""How Sphinx builds these pages; `make docs` runs it. Pages are MyST Markdown, the reference is from docstrings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

project = "espresso_mpi"
author = "The espresso_mpi authors"
copyright = author
release = re.findall(r'^version = "(.*)"', (HERE.parent / "pyproject.toml").read_text(), re.M)[0]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "_generated"]
html_theme = "furo"
html_title = f"espresso_mpi {release}"
html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_mock_imports = ["torch", "lightning", "jax", "optax"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings name types and shapes
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_use_rtype = False

copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .gp, .go"

nitpick_ignore_regex = [
    ("py:.*", r"collections\.abc\..*"),
    ("py:class", r"os\.PathLike"),  # of the standard library, which these pages do not link
    ("py:class", r"(espresso_mpi\..*\.)?(Schedule|Workspace|\w+Settings)"),  # internal: types of attributes
]

# --- errors: docstrings name them without their module ---


def resolve_error(app, environment, node, contnode):
    """Link `ConfigError` in a docstring to `espresso_mpi.errors.ConfigError`."""
    import espresso_mpi.errors

    name = node.get("reftarget", "").rpartition(".")[2]
    if not hasattr(espresso_mpi.errors, name):
        return None
    target = f"espresso_mpi.errors.{name}"
    python = environment.get_domain("py")
    return python.resolve_xref(environment, node["refdoc"], app.builder, "exc", target, node, contnode)


# --- pages: docstrings name them by their path ---

PAGE = re.compile(r"\bdocs/([\w-]+)\.md\b")


def link_pages(app, what, name, obj, options, lines):
    """Make a link of `docs/planner.md` in a docstring."""
    lines[:] = [PAGE.sub(r":doc:`/\1`", line) for line in lines]


def setup(app):
    app.connect("missing-reference", resolve_error)
    app.connect("autodoc-process-docstring", link_pages)


# --- the command line -------------------------------------------------------------------------------------------------

DIMMED = re.compile(r"<span style=[^>]*>(.*?)</span>", re.S)
"""How typer writes the example of a command."""


def write_commands() -> None:
    """Let typer describe the command `espresso-mpi`, for reference/cli.md."""
    command = [sys.executable, "-m", "typer", "espresso_mpi.cli.program", "utils", "docs", "--name", "espresso-mpi"]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=True)
    text = DIMMED.sub(lambda found: f"```console\n$ {found[1]}\n```", done.stdout)
    text = text.removeprefix("# `espresso-mpi`\n")  # the page has a title
    target = HERE / "_generated" / "cli.md"
    target.parent.mkdir(exist_ok=True)
    target.write_text(text)


write_commands()
