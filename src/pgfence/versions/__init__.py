"""Versions of rows. A write applies to the version that was read, or raises an error that lists the conflicting rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence.versions.etags import IfMatch, etag, if_match

if TYPE_CHECKING:
    from pgfence.versions._loading import load_for_version
    from pgfence.versions._mixin import Versioned, VersionedUUID
    from pgfence.versions._session import VersionedSession

__all__ = ["IfMatch", "Versioned", "VersionedSession", "VersionedUUID", "etag", "if_match", "load_for_version"]

_HOME = {
    "Versioned": "_mixin",
    "VersionedSession": "_session",
    "VersionedUUID": "_mixin",
    "load_for_version": "_loading",
}


if not TYPE_CHECKING:  # type checkers must report a misspelt name

    def __getattr__(name: str) -> object:
        """Import the classes and functions that need SQLAlchemy's ORM on first access, because importing the ORM is slow."""
        if name in _HOME:
            from importlib import import_module

            return getattr(import_module(f"pgfence.versions.{_HOME[name]}"), name)
        raise AttributeError(f"module 'pgfence.versions' has no attribute {name!r}")
