"""The longer jobs once more, while one holder is killed and another one's session is ended by an administrator."""

from __future__ import annotations

from pgfence._demo.workload import Act, Blow
from pgfence._demo.workloads.advisory import work

ACT = Act(
    name="advisory-lock-failures",
    title="same, holders killed",
    work=work,
    blows=(Blow.KILL, Blow.TERMINATE),
)
