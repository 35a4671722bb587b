"""The longer jobs again, while one holder is killed and the session of another holder is terminated."""

from __future__ import annotations

from pgfence._demo.workload import Fault, Workload
from pgfence._demo.workloads.advisory import work

ACT = Workload(
    name="advisory-lock-failures",
    title="same, holders killed",
    work=work,
    faults=(Fault.KILL, Fault.TERMINATE),
)
