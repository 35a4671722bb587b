"""`AdvisoryLock`: one holder per name and database, for as long as a server session lives.

What is promised: at most one holder per key per database, among all who use PostgreSQL's advisory locks on that key. The
server is the authority; it frees the lock when it sees the session end, whatever becomes of the holder. The holder is told of
that end: within milliseconds where the socket is closed, within 20 s where the network is cut, before the server gives up.

What is not promised: that a paused or cut-off holder has stopped writing (do its database work on `connect()`, whose
connection dies with the lock, or fence it); a strict order between processes (inside one, first come first served; among several
only waits of more than half a second have an order); that a cycle
between two separate locks of two processes is noticed: take both in one lock with many names, which always asks in one order.
A lock is per database and per server: a standby or another database knows nothing of it, and a failover ends it.

Crash, SIGKILL: free after milliseconds. Cancel, Ctrl-C: at any point, twice: the connection is closed, the lock is free.
`engine.dispose()`: does not end a hold. Fork: the child holds nothing and harms nothing. Pooler in transaction mode, standby,
look-alike: refused with the way out.

Sources: PostgreSQL manual, "Explicit Locking" (advisory locks) and "Advisory Lock Functions".
"""

from __future__ import annotations

from pgfence.advisory._aio import AsyncAdvisoryLock
from pgfence.advisory._sync import AdvisoryLock

__all__ = ["AdvisoryLock", "AsyncAdvisoryLock"]
