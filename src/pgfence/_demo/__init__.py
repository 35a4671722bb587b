"""The workload behind `pgfence demo`: real processes move money on a real server, without a guard and with each of ours.

`stage.play` runs acts and returns figures, `acts` has one file an act, `worker` is the program of each process, `bank` the
accounts and the ledger that finds lost money. Nothing here prints: the command line shows what `play` tells it.
"""

from __future__ import annotations
