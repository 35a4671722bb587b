"""Link the names of other libraries in signatures, which are written as they are imported, to their documentation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from docutils.nodes import Element
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

INVENTORIES = Path(__file__).parents[1] / "_inventories"
SITES = {
    "python": "https://docs.python.org/3/",
    "sqlalchemy": "https://docs.sqlalchemy.org/en/20/",
    "alembic": "https://alembic.sqlalchemy.org/en/latest/",
    "opentelemetry": "https://opentelemetry-python.readthedocs.io/en/latest/",
}


def inventories() -> dict[str, tuple[str, tuple[str | None, ...]]]:
    """Return the sites for intersphinx; where one cannot be reached, the names that we use come from a file of ours."""
    return {
        name: (url, (None, str(INVENTORIES / f"{name}.txt")))
        for name, url in SITES.items()
    }


def full_names() -> dict[str, str]:
    """Return the full name in the documentation of each name in our own inventories, by its last part."""
    rows = [
        row.split()
        for site in SITES
        for row in (INVENTORIES / f"{site}.txt").read_text("utf-8").splitlines()[3:]
    ]
    return {name.rpartition(".")[2]: name for name, _, _ in rows}


def _complete(
    _app: Sphinx, env: BuildEnvironment, node: pending_xref, _contents: Element
) -> None:
    names: dict[str, str] = env.config.external_names
    if node.get("refdomain") == "py":
        node["reftarget"] = names.get(
            node["reftarget"].rpartition(".")[2], node["reftarget"]
        )


def setup(app: Sphinx) -> dict[str, Any]:
    """Complete names before intersphinx, which has the priority 500, looks for them."""
    app.add_config_value("external_names", full_names(), "env")
    app.connect("missing-reference", _complete, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
