"""Configuration of Sphinx."""

from __future__ import annotations

import pgfence

project = "pgfence"
author = copyright = "The pgfence authors"  # noqa: A001
version = release = pgfence.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]
# `x` in a docstring is code.
default_role = "code"

# A reference to a public name of ours has to lead somewhere; those to other libraries are plain text.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!pgfence\.([A-Z]|configure|current|held|compat|embedded)).*")]

html_theme = "furo"
html_title = "pgfence"
html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Overloads and defaults stand in the signature, words in the text.
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autoclass_content = "both"
napoleon_numpy_docstring = False

# Only blocks that say so are doctests; `>>>` in a plain block is shown, not run.
doctest_test_doctest_blocks = ""
