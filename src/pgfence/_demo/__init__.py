"""The workload of `pgfence demo`: processes transfer money on a PostgreSQL server, without a guard and with each guard.

`runner.play` runs the acts and scenes and returns their figures. `workloads` has a module for each act, and `scenarios` has a
module for each scene. `worker` is the program of each process, and `bank` has the accounts and the journal. The command line
prints the results.
"""

from __future__ import annotations
