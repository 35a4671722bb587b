"""Which process this is, without asking the kernel each time."""

from __future__ import annotations

import os


class Process:
    """This process. A forked child finds its own number here before any other code of it runs."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.pid = os.getpid()


PROCESS = Process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PROCESS.renew)
