"""The documentation: `make docs` writes it to build/docs/index.html. Pages are Markdown, api/ is docstrings."""

import re

import jax_fp4

project, author, version = "jax_fp4", "the jax_fp4 authors", jax_fp4.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme, html_title = "furo", f"jax_fp4 {version}"
myst_heading_anchors = 3
default_role = "py:obj"  # `name` in a docstring is a link where it can be one, and code where not
smartquotes = False  # "default" is a value
autodoc_typehints = "none"  # shapes, dtypes and defaults stand in the docstrings
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 100
suppress_warnings = ["misc.highlighting_failure"]  # errors quoted as text

_TABLE = re.compile(r"\S {2,}\S")
_ITEM = re.compile(r"^[a-z]\w*(, \w+)*: ")


def _as_rst(app, what, name, obj, options, lines: list[str]) -> None:
    """Docstrings are plain text: paragraphs, tables by spaces, indented code, and "name: what it is" for arguments."""
    paragraphs = [p.split("\n") for p in re.split(r"\n\s*\n", "\n".join(lines).strip("\n"))]
    lines[:] = [line for paragraph in paragraphs for line in (*_paragraph(paragraph), "")]


def _paragraph(paragraph: list[str]) -> list[str]:
    if paragraph[0].startswith("    ") or any(_TABLE.search(line) for line in paragraph):
        return ["::", "", *(f"    {line}" for line in paragraph)]
    escaped = [re.sub(r"(?<!\\)([*|])", r"\\\1", line) for line in paragraph]
    if not any(_ITEM.match(line) for line in escaped):
        return [line.strip() for line in escaped]
    out, indent = [], ""
    for line in escaped:
        if item := _ITEM.match(line):
            names, rest = line[: item.end() - 2], line[item.end() :]
            out, indent = [*out, "", f"* **{names}**: {rest}"], "  "
        else:
            out.append(indent + line.strip())
    return out


def setup(app) -> None:
    app.connect("autodoc-process-docstring", _as_rst)
