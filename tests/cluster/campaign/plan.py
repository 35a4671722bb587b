"""Which strikes follow each other in a campaign."""

from __future__ import annotations

import random

from cluster.strikes import FAILOVERS, Strike

FAST = (Strike.SWITCHOVER, Strike.KILL_POSTMASTER)
"""Kinds after which there is a new leader within seconds. The others take as long as Patroni's leader key."""
SLOW = tuple(kind for kind in FAILOVERS if kind not in FAST)
SLOW_SHARE = 10
"""One of so many failovers is of a given slow kind."""
OTHERS_SHARE = 25
"""There is one strike without a failover, of each kind, for so many failovers."""


def build_plan(failovers: int, seed: int) -> list[Strike]:
    """Return the strikes of a campaign in a mixed order. At least a tenth of the failovers are of each slow kind."""
    plan = [kind for kind in SLOW for _ in range(max(1, failovers // SLOW_SHARE))][:failovers]
    plan += [FAST[number % len(FAST)] for number in range(failovers - len(plan))]
    others = [kind for kind in Strike if kind not in FAILOVERS]
    plan += [kind for kind in others for _ in range(failovers // OTHERS_SHARE)]
    random.Random(seed).shuffle(plan)
    return plan
