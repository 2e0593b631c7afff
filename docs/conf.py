"""Sphinx configuration. Build: sphinx-build -W -b html docs docs/_build/html

Two things are made here so that they cannot drift from the code: the help texts of the command line (the directive
`gemline-help` runs the parser itself), and the interface pages (autodoc, with docstrings kept as they are laid out).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import os
import re
from importlib import metadata
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

project = "Gemline"
copyright = "the Gemline contributors"
release = version = metadata.version("gemline")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["gemline.css"]
html_title = f"Gemline {release}"
html_theme_options = {"source_edit_link": ""}
html_show_sphinx = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "undoc-members": True}
python_use_unqualified_type_names = True


def keep_layout(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Our docstrings are plain text whose columns line up: the first paragraph becomes prose, the rest stays."""
    text = inspect.cleandoc("\n".join(lines))
    if what == "attribute" and not text:
        return
    first, _, rest = text.partition("\n\n")
    parts = re.split(r"`([^`]+)`", " ".join(first.split()))  # every second part was between backticks
    escaped = (f"``{part}``" if i % 2 else re.sub(r"([\\*`|_])", r"\\\1", part) for i, part in enumerate(parts))
    prose = "\\ ".join(part for part in escaped if part)
    block = [f"   {line}".rstrip() for line in rest.strip("\n").split("\n")]
    lines[:] = [prose, ""]
    if rest.strip():
        lines += [".. code-block:: text", "", *block, ""]


def short_signature(app: Any, what: str, name: str, thing: Any, *_: Any) -> tuple[str, None] | None:
    """The fields of a dataclass stand below it with their defaults: not twice."""
    return ("", None) if what == "class" and dataclasses.is_dataclass(thing) else None


class HelpDirective(Directive):
    """`gemline-help` COMMAND: what `gemline COMMAND --help` prints, 100 columns wide."""

    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        from gem_pipelines.cli import main

        arguments = self.arguments[0].split() if self.arguments else []
        os.environ["COLUMNS"] = "100"
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                code = main([*arguments, "--help"])
            except SystemExit as ended:
                code = ended.code
        if code not in (0, None):
            raise self.error(f"gemline {' '.join(arguments)} --help ended with exit code {code}")
        text = printed.getvalue().strip("\n")
        return [nodes.literal_block(text, text, language="text")]


class DatasetsDirective(Directive):
    """`gemline-datasets`: every data set known by name, what it is, and its options."""

    def run(self) -> list[nodes.Node]:
        import gem_datasets

        lines = []
        for name in gem_datasets.names():
            options = gem_datasets.options_type(name)
            about = inspect.getdoc(inspect.getmodule(options)) or ""
            lines += [f"{name}: {' '.join(about.split(chr(10) * 2)[0].split())}"]
            lines += [f"    {field.name}={field.default}" for field in dataclasses.fields(options)] + [""]
        text = "\n".join(lines).strip()
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", keep_layout)
    app.connect("autodoc-process-signature", short_signature)
    app.add_directive("gemline-help", HelpDirective)
    app.add_directive("gemline-datasets", DatasetsDirective)
