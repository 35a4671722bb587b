"""Configuration of Sphinx."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pgfence

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from external_names import full_names, inventories

project = "pgfence"
author = copyright = "The pgfence authors"  # noqa: A001
version = release = pgfence.__version__

extensions = [
    "external_names",
    "llms_txt",
    "myst_parser",
    "notfound.extension",
    "signatures",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_sitemap",
    "sphinxext.opengraph",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
# `x` in a docstring is code.
default_role = "code"

# A reference has to lead somewhere. Exceptions are names of FastAPI, Starlette and SQLAlchemy without a page, and type variables.
_WITHOUT_PAGE = "FastAPI|HTTPException|ORMOption|RequestValidationError|Response"
nitpicky = True
nitpick_ignore_regex = [
    (
        "py:.*",
        rf"(.*\.)?({'|'.join(full_names())}|{_WITHOUT_PAGE})",
    ),
    ("py:class", r"(.*\.)?_?(O|T|R|S|AS|HoldT|AnyHeld)"),
]

# Links into other documentation. Without a network the names that we use are known all the same.
intersphinx_mapping = inventories()
intersphinx_timeout = 5
intersphinx_disabled_reftypes = ["*"]

# The address of the published site, in its sitemap, llms.txt, 404 page and previews.
html_baseurl = os.environ.get(
    "READTHEDOCS_CANONICAL_URL", "https://pgfence.readthedocs.io/en/stable/"
)
notfound_urls_prefix = urlsplit(html_baseurl).path
sitemap_url_scheme = "{link}"
sitemap_excludes = ["404.html", "genindex.html", "py-modindex.html", "search.html"]
ogp_site_url = html_baseurl
ogp_social_cards = {"enable": False}

html_theme = "furo"
# The default underlines the names of modules.
pygments_dark_style = "github-dark"
html_title = "pgfence"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["pgfence.css"]
# The text is in _templates/page.html, with links that are relative to the page.
html_theme_options = {"announcement": "pgfence"}

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Overloads and defaults stand in the signature, words in the text.
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autoclass_content = "both"
napoleon_numpy_docstring = False
autosummary_generate = False

# What the short names in the source stand for.
signature_aliases = {
    "AH": "AsyncHeld",
    "AnyAsyncSession": "AsyncSession | async_scoped_session",
    "AnyHeldLease": "HeldLease | AsyncHeldLease",
    "App": "Callable[..., Awaitable[None]]",
    "AsyncEngineSource": "AsyncEngine | Callable[[], AsyncEngine]",
    "AsyncEngineSourceT": "AsyncEngine | Callable[[], AsyncEngine]",
    "AsyncInTransaction": "Callable",
    "AsyncLockBase": "AsyncAdvisoryLock",
    "AsyncWork": "AsyncSession | async_scoped_session | AsyncConnection",
    "AsyncWrap": "Callable",
    "AsyncWrapSkip": "Callable",
    "Busy": "Literal['raise', 'skip'] | Callable[[LockTimeoutError], BaseException]",
    "CancelEvent": "threading.Event",
    "EngineSource": "Engine | Callable[[], Engine]",
    "EngineSourceT": "Engine | Callable[[], Engine]",
    "Expected": "int | UUID | IfMatch",
    "H": "Held",
    "Headers": "Mapping[str, str]",
    "InTransaction": "Callable",
    "LockBase": "AdvisoryLock",
    "OnFailure": "Literal['free', 'lapse']",
    "OnMismatch": "Literal['raise', 'stored']",
    "PoolerSetting": "Literal['auto', 'direct', 'session', 'transaction']",
    "Process": "int | subprocess.Popen | multiprocessing.Process",
    "SameCall": "Callable",
    "Scope": "MutableMapping[str, Any]",
    "SyncSession": "Session | scoped_session",
    "SyncWork": "Session | scoped_session | Connection",
    "Unreachable": "Literal['raise', 'skip', 'run']",
    "Wrap": "Callable",
    "WrapSkip": "Callable",
    "sync_sessionmaker": "sessionmaker",
}
# Overloads that autodoc does not find in a subclass.
_WRAP = "(*, timeout: Seconds | None = None, busy: Busy = 'raise', unreachable: Unreachable = 'raise')"
signature_replacements = {
    "pgfence.HeldLease.begin": (
        "(factory: sessionmaker[S] | Engine, *resources: str)",
        "AbstractContextManager[S | Connection, None]",
    ),
    "pgfence.AsyncHeldLease.begin": (
        "(factory: async_sessionmaker[AS] | AsyncEngine, *resources: str)",
        "AbstractAsyncContextManager[AS | AsyncConnection, None]",
    ),
    **{
        f"pgfence.{name}.wrap": (_WRAP, "Callable")
        for name in (
            "AdvisoryLock",
            "AsyncAdvisoryLock",
            "Lease",
            "AsyncLease",
            "Semaphore",
            "AsyncSemaphore",
        )
    },
}
# Objects that a program gets from pgfence and does not create.
signature_without_constructor = [
    f"pgfence.{name}"
    for name in [
        *(
            "Held",
            "AsyncHeld",
            "FencedHeld",
            "AsyncFencedHeld",
            "HeldLease",
            "AsyncHeldLease",
            "Slot",
            "AsyncSlot",
        ),
        *(
            "WriteHeld",
            "AsyncWriteHeld",
            "Permit",
            "AsyncPermit",
            "Term",
            "AsyncTerm",
            "Member",
            "AsyncMember",
            "Worker",
            "AsyncWorker",
        ),
        *(
            "Idem",
            "AsyncIdem",
            "Op",
            "Attempt",
            "AsyncAttempt",
            "KeyFamily",
            "fastapi.IdempotentCall",
            "testing.PgfenceFaults",
            "testing.PgfenceHistory",
        ),
    ]
]

# Only blocks that say so are doctests; `>>>` in a plain block is shown, not run.
doctest_test_doctest_blocks = ""
