"""Which process this is, without asking the kernel each time."""

from __future__ import annotations

import os


class Process:
    """This process. A forked child finds its own number here before any other code of it runs."""

    __slots__ = ("ending", "forks", "pid")

    def __init__(self) -> None:
        self.forks = 0
        """How often it has forked: a child has a copy of a socket that was being opened at that moment."""
        self.ending = False
        """The interpreter ends; daemon threads are still about."""
        self.renew()

    def forked(self) -> None:
        self.forks += 1

    def renew(self) -> None:
        self.pid = os.getpid()


PROCESS = Process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=PROCESS.forked, after_in_child=PROCESS.renew)
