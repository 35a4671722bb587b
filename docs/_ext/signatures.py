"""Show signatures as a reader needs them: aliases spelled out, the sync form first, no constructor that nobody calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sphinx import addnodes
from sphinx.domains.python._annotations import _parse_annotation

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx


def _replace(
    app: Sphinx, what: str, name: str, *_: object
) -> tuple[str, str | None] | None:
    if what == "class" and name in app.config.signature_without_constructor:
        return "", None
    found: tuple[str, str] | None = app.config.signature_replacements.get(name)
    return found


def _spell_out(app: Sphinx, doctree: nodes.document) -> None:
    aliases: dict[str, str] = app.config.signature_aliases
    for signature in doctree.findall(addnodes.desc_signature):
        for reference in list(signature.findall(addnodes.pending_xref)):
            alias = reference["reftarget"].rpartition(".")[2]
            if "Async" in signature.get("fullname", "") and f"Async{alias}" in aliases:
                alias = f"Async{alias}"
            if alias in aliases:
                reference.replace_self(_parse_annotation(aliases[alias], app.env))


def _is_async(signature: addnodes.desc_signature) -> bool:
    return "Async" in signature.astext() or "async_" in signature.astext()


def _order(_app: Sphinx, doctree: nodes.document) -> None:
    """Put overloads in the order of a reader; a type checker needs the async ones first, and those that are forbidden."""
    for description in doctree.findall(addnodes.desc):
        signatures = [
            node
            for node in description.children
            if isinstance(node, addnodes.desc_signature)
        ]
        allowed = [node for node in signatures if not node.astext().endswith("Never")]
        if len(signatures) > 1:
            ids = [one for node in signatures for one in node["ids"]]
            for node in signatures:
                node["ids"] = []
                description.remove(node)
            allowed.sort(key=_is_async)
            allowed[0]["ids"] = ids
            description[:0] = allowed


def setup(app: Sphinx) -> dict[str, Any]:
    """Change the signatures of a page when it has been read."""
    app.setup_extension("sphinx.ext.autodoc")
    app.add_config_value("signature_aliases", {}, "env")
    app.add_config_value("signature_replacements", {}, "env")
    app.add_config_value("signature_without_constructor", [], "env")
    app.connect("autodoc-process-signature", _replace)
    app.connect("doctree-read", _spell_out)
    app.connect("doctree-read", _order)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
