"""Effects outside the database: claimed first, done once, continued where they stopped."""

from __future__ import annotations
