"""Write llms.txt (https://llmstxt.org): each page of the table of contents with its link and its first sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx import addnodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment


def first_sentence(doctree: nodes.document) -> str:
    """Return the first sentence of the first paragraph."""
    for paragraph in doctree.findall(nodes.paragraph):
        text = " ".join(paragraph.astext().split())
        return re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]
    return ""


def lines(env: BuildEnvironment, project: str, site: str) -> Iterator[str]:
    """Yield the lines of the file."""
    front = env.get_doctree(env.config.root_doc)
    yield f"# {project}\n\n> {first_sentence(front)}\n"
    for contents in front.findall(addnodes.toctree):
        yield f"\n## {contents['caption']}\n\n"
        for _, page in contents["entries"]:
            title = " ".join(env.titles[page].astext().split())
            yield f"- [{title}]({site}{page}.html): {first_sentence(env.get_doctree(page))}\n"


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        content = "".join(lines(app.env, app.config.project, app.config.html_baseurl))
        Path(app.outdir, "llms.txt").write_text(content, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the file when the pages are written."""
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
