"""Coordination through the PostgreSQL you already have, for SQLAlchemy, sync and async."""

from __future__ import annotations

from pgfence import compat as compat
from pgfence.advisory import AdvisoryLock as AdvisoryLock
from pgfence.advisory import AsyncAdvisoryLock as AsyncAdvisoryLock
from pgfence.config import configure as configure
from pgfence.handles import AsyncHeld as AsyncHeld
from pgfence.handles import Held as Held
from pgfence.handles import current as current
from pgfence.handles import held as held
