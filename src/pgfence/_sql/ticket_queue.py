"""The queue of waiters of different processes, made of advisory locks.

A waiter that waits in the server for one slice at a time joins the end of the server's queue again after each slice, so that
later waiters overtake it. Therefore it takes a ticket, which is a session lock on the next number of a queue that belongs to the
key. It waits for the ticket ahead of its own, for which no other waiter waits, and for the key itself when no ticket is ahead.
With a ticket, it keeps its place at the end of a slice.

    base + 0 ... base + 2**20 - 1   the tickets; after the last number comes the first
    base + 2**20                    the counter: locked while a ticket is taken
    base + 2**20 + 1 ...            the clock: a waiter has a shared lock on the second in which it took its ticket
    base + 2**20 + 2**19 ...        the signs: a waiter that sleeps has a shared lock on the second of its last sign
    base + 2**21 - 1                the batch: locked by the first of several waiting writers until it is its turn

For a waiting session, `pg_locks` shows only when the current slice began. The clock shows every reader of `pg_locks` how long the
whole wait has lasted.

A waiter far from the front of a queue that does not move sleeps on the client instead, without a transaction, and looks from time
to time whether the queue has moved. The owner of a ticket that neither waits for a lock nor gave a sign within the last seconds
counts as stopped and is passed over.

All of these are keys of the bigint space. `base` is a hash of the lock's key without the last 21 bits.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from pgfence._sql.activity import build_arguments
from pgfence._sql.params import mark
from pgfence.keys import SEPARATOR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgfence._sql.params import ParamStyle
    from pgfence.keys import LockKey

_BITS = 20
_COUNTER = 2**_BITS
_BATCH = 2 * _COUNTER - 1
END_OF_QUEUE = 2 * _COUNTER - 1
"""A mask of the bits in which the keys of one queue differ. `key | END_OF_QUEUE` is the last key of its queue."""
_MASK = _COUNTER - 1
_CLOCK = _COUNTER + 1
SECONDS = _COUNTER // 2 - 1
"""The number of seconds after which the clock starts again: six days."""
_SIGNS = _CLOCK + SECONDS
_SECOND = f"pg_catalog.mod(pg_catalog.date_part('epoch', pg_catalog.clock_timestamp())::bigint, {SECONDS})"
_FRESH = 5
"""A sign shows for this many seconds that its owner has not stopped. The owner gives one every 2 s, or after its sleep."""
_HALF = _COUNTER // 2
"""Tickets held at one time span less than half of the circle, so that the older of any two is known."""

_COUNTER_MS = 500
"""The milliseconds to wait at least for the counter, which others hold for a moment. Without a ticket, a waiter has no place."""

BETWEEN_SLICES_MS = 100
"""The milliseconds after which an owner that was between two slices waits again."""

TICKET = "pgfence.ticket"
"""The setting with the session's ticket, a key. It is empty if the session has none, and `none` if no ticket was available."""
AHEAD = "pgfence.ahead"
"""The setting with the ticket ahead. It is empty if it is this session's turn."""
_SINCE = "pgfence.since"
"""The setting with the key of the clock that the session has locked."""
AWAKE = 3
"""The number of waiters at the front of a queue that never sleep, so that the lock is handed over while others wake up."""
_SIGN = "pgfence.sign"
"""The setting with the key of the last sign that the session gave."""
BATCH = "pgfence.batch"
"""The setting that says whether the wait for the batch succeeded."""
_MINE = f"NULLIF(NULLIF(pg_catalog.current_setting('{TICKET}', true), ''), 'none')::bigint"
_AHEAD = f"NULLIF(pg_catalog.current_setting('{AHEAD}', true), '')::bigint"
_UNLOCK_CLOCK = (
    f"pg_catalog.pg_advisory_unlock_shared(NULLIF(pg_catalog.current_setting('{_SINCE}', true), '')::bigint),"
    f" pg_catalog.set_config('{_SINCE}', '', false),"
    f" pg_catalog.pg_advisory_unlock_shared(NULLIF(pg_catalog.current_setting('{_SIGN}', true), '')::bigint),"
    f" pg_catalog.set_config('{_SIGN}', '', false)"
)


def find_queue(keys: Sequence[LockKey]) -> int:
    """Return the base of a lock's queue: the first 8 bytes of a SHA-256 over its keys, without their last 21 bits.

    Locks share a queue only if they have the same keys. In a queue for several sets of keys, the first waiter would delay waiters
    whose own keys are free.
    """
    names = [f"raw:{key.value}" if key.space == "bigint" else "pair:{}:{}".format(*key.halves) for key in keys]
    digest = hashlib.sha256(SEPARATOR.join(["", *names, "queue"]).encode()).digest()
    shift = _BITS + 1
    return (int.from_bytes(digest[:8], "big", signed=True) >> shift) << shift


def find_queue_of(ticket: int) -> int:
    """Return the base of the queue that a ticket belongs to."""
    return (ticket >> _BITS + 1) << _BITS + 1


_VALUE = "((l.classid::bigint << 32) | l.objid::bigint)"

# A waiter takes a shared lock on the ticket ahead while it waits. Only the owner of a ticket holds it exclusively.
_HELD_HERE = (
    "l.locktype = 'advisory' AND l.granted AND l.mode = 'ExclusiveLock' AND l.objsubid = 1"
    " AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())"
)
_TICKETS = f"pg_catalog.pg_locks AS l WHERE {_HELD_HERE} AND {_VALUE} BETWEEN base AND base + {_MASK}"
_SHIFT = _BITS + 1
IS_TICKET = (
    f"o.granted AND o.mode = 'ExclusiveLock' AND o.space = 1 AND (o.value & {_COUNTER}) = 0"
    f" AND c.granted AND c.mode = 'ShareLock' AND c.space = 1 AND (c.value & {2 * _COUNTER - 1}) BETWEEN {_CLOCK} AND {_SIGNS - 1}"
    f" AND c.pid = o.pid AND c.value >> {_SHIFT} = o.value >> {_SHIFT}"
)
"""The condition that of two locks `o` is a ticket, and `c` the clock of the same session."""
IS_SIGN = (
    f"k.granted AND k.mode = 'ShareLock' AND k.space = 1 AND (k.value & {2 * _COUNTER - 1}) BETWEEN {_SIGNS} AND {_BATCH - 1}"
    f" AND k.pid = t.pid AND k.value >> {_SHIFT} = t.ticket >> {_SHIFT}"
)
"""The condition that the lock `k` is a sign of the owner of the ticket `t`."""
WAITED = (
    "pg_catalog.mod(pg_catalog.mod(EXTRACT(EPOCH FROM pg_catalog.clock_timestamp())::bigint"
    f" - (c.value & {2 * _COUNTER - 1}) + {_CLOCK}, {SECONDS}) + {SECONDS}, {SECONDS})"
)
"""The seconds since the owner of the clock `c` took its ticket."""
HAS_TICKETS = f"EXISTS (SELECT FROM (SELECT CAST({{0}} AS bigint) AS base) AS q, {_TICKETS})"
"""The condition that the queue with this base has tickets."""
LEAVE = (
    f"SELECT pg_catalog.pg_advisory_unlock({_MINE}), pg_catalog.set_config('{TICKET}', '', false),"
    f" pg_catalog.set_config('{AHEAD}', '', false), {_UNLOCK_CLOCK}"
)
"""The statement that returns the session's ticket.

Its result is false if the ticket was lost, and NULL if the session has none.
"""

# The counter's lock ends with the inner block, which is rolled back. The ticket is a session lock and stays.
_TAKE_TICKET = f"""DO $$DECLARE base CONSTANT bigint := {{base}}; ticket bigint; ahead bigint;
 since bigint := base + {_CLOCK} + {_SECOND};
BEGIN
 BEGIN
  PERFORM pg_catalog.set_config('lock_timeout', '{{counter_ms}}', true), pg_catalog.pg_advisory_xact_lock(base + {_COUNTER});
  SELECT base + ((pg_catalog.max((t.n - t.r + {_HALF}) & {_MASK}) + t.r - {_HALF}) & {_MASK}) INTO ahead
   FROM (SELECT x.n, pg_catalog.min(x.n) OVER () AS r FROM (SELECT {_VALUE} - base AS n FROM {_TICKETS}) AS x) AS t
   GROUP BY t.r;
  ticket := base + ((COALESCE(ahead - base, {_MASK}) + 1) & {_MASK});
  IF NOT pg_catalog.pg_try_advisory_lock(ticket) THEN ticket := NULL; ahead := NULL; END IF;
  IF ticket IS NULL OR NOT pg_catalog.pg_try_advisory_lock_shared(since) THEN since := NULL; END IF;
  RAISE EXCEPTION USING ERRCODE = 'PF000';
 EXCEPTION WHEN SQLSTATE 'PF000' OR lock_not_available THEN NULL;
 END;
 PERFORM pg_catalog.set_config('{TICKET}', COALESCE(ticket::text, 'none'), false),
  pg_catalog.set_config('{AHEAD}', COALESCE(ahead::text, ''), false),
  pg_catalog.set_config('{_SINCE}', CASE WHEN ticket IS NULL THEN '' ELSE COALESCE(since::text, '') END, false);
END$$"""

_IS_FRESH = (
    f"{_VALUE} BETWEEN q.base + {_SIGNS} AND q.base + {_BATCH - 1}"
    f" AND pg_catalog.mod(q.second - ({_VALUE} - q.base - {_SIGNS}) + {SECONDS}, {SECONDS}) <= {_FRESH}"
)
# This finds the nearest ticket ahead whose owner waits or sleeps. The owner of a skipped ticket does neither, for example because
# its process was stopped. pg_locks is read only once, and `q` is computed only once, because it contains a volatile function.
_BASE = f"(x.mine >> {_SHIFT} << {_SHIFT})"
_NEXT = f"COALESCE((x.mine - x.nearest & {_MASK} | {_BASE})::text, '')"
_MOVE_UP = f"pg_catalog.set_config('{AHEAD}', {_NEXT}, false)"
_FRONT = f"CASE WHEN x.awake >= {AWAKE} THEN x.mine - x.first & {_MASK} | {_BASE} END, x.ahead"
_TICKETS_AHEAD = f""" FROM (SELECT pg_catalog.max(s.mine) AS mine, pg_catalog.count(*) AS ahead, pg_catalog.min(s.d) AS nearest,
   pg_catalog.max(s.d) FILTER (WHERE s.waits) AS first, pg_catalog.count(*) FILTER (WHERE s.waits) AS awake
  FROM (SELECT q.mine, pg_catalog.bool_or(NOT l.granted) AS waits, pg_catalog.bool_or({_IS_FRESH}) AS has_sign,
    (q.mine - pg_catalog.max({_VALUE}) FILTER (WHERE l.granted AND l.mode = 'ExclusiveLock' AND {_VALUE} <= q.base + {_MASK}))
     & {_MASK} AS d
   FROM (SELECT m.mine, m.mine >> {_SHIFT} << {_SHIFT} AS base, {_SECOND} AS second, d.oid AS here
    FROM (SELECT {_MINE} AS mine) AS m, pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database()) AS q,
    pg_catalog.pg_locks AS l
   WHERE NOT l.granted OR l.locktype = 'advisory' AND l.objsubid = 1 AND l.database = q.here
    AND {_VALUE} BETWEEN q.base AND q.base + {_BATCH}
   GROUP BY l.pid, q.mine) AS s
  WHERE (s.waits OR s.has_sign) AND s.d BETWEEN 1 AND {_HALF - 1}) AS x"""
COUNT_TICKETS = f"SELECT {_FRONT}{_TICKETS_AHEAD}"
"""The statement that returns the last two columns of `CHECK_TICKETS`, without moving up."""
CHECK_TICKETS = f"SELECT {_MOVE_UP}, {_FRONT}{_TICKETS_AHEAD}"
"""The statement that moves up to the nearest ticket ahead. It has no parameters, so that its plan is kept.

It returns the ticket ahead, or an empty string if it is this session's turn; the first ticket whose owner waits in the server, or
NULL if fewer than `AWAKE` owners ahead wait there; and the number of tickets ahead.
"""

# This runs twice a second for each waiter at the front. It moves up in the same statement, because an extra one would compete for
# the processor with the waiter that has just been granted the lock.
_WAIT_FOR_TURN = f"""DO $$BEGIN
 PERFORM pg_catalog.set_config('lock_timeout', '{{ms}}', true), pg_catalog.pg_advisory_xact_lock_shared({_AHEAD});
 PERFORM {_MOVE_UP}{_TICKETS_AHEAD};
EXCEPTION WHEN lock_not_available THEN {{look}}
END$$"""
# An owner that is between two slices seems to have stopped, so it is passed over only if it still seems so a moment later. Until
# then, this waiter waits for a lock in the same statement, so that the waiters behind it do not pass it over.
_PASS_STOPPED = f"""IF (SELECT {_NEXT}{_TICKETS_AHEAD}) OPERATOR(pg_catalog.<>) pg_catalog.current_setting('{AHEAD}', true) THEN
  BEGIN
   PERFORM pg_catalog.set_config('lock_timeout', '{{ms}}', true), pg_catalog.pg_advisory_xact_lock_shared({_AHEAD});
  EXCEPTION WHEN lock_not_available THEN NULL;
  END;
  PERFORM {_MOVE_UP}{_TICKETS_AHEAD};
 END IF;"""
_IS_TURN = f"SELECT 1 WHERE pg_catalog.current_setting('{AHEAD}', true) OPERATOR(pg_catalog.=) ''"

# The locks on the keys follow the wait in the same statement, so that they are planned before the wait.
_WAIT_FOR_KEYS = f"""DO $$DECLARE keys bigint[]; pairs bigint[]; k bigint;
BEGIN
 {{before}}
 PERFORM {{locks}}, pg_catalog.pg_advisory_unlock({_MINE}), {_UNLOCK_CLOCK},
  pg_catalog.set_config('{AHEAD}', '', false), pg_catalog.set_config('{TICKET}', '', false);
EXCEPTION WHEN lock_not_available THEN NULL;
END$$"""
_IS_GRANTED = f"SELECT 1 WHERE pg_catalog.current_setting('{TICKET}', true) OPERATOR(pg_catalog.=) ''"

_WAIT_FOR_BATCH = f"""DO $$BEGIN
 PERFORM pg_catalog.set_config('lock_timeout', '{{ms}}', true), pg_catalog.pg_advisory_xact_lock_shared({{key}}),
  pg_catalog.set_config('{BATCH}', 'open', false);
EXCEPTION WHEN lock_not_available THEN PERFORM pg_catalog.set_config('{BATCH}', '', false);
END$$"""
_IS_OPEN = f"SELECT 1 WHERE pg_catalog.current_setting('{BATCH}', true) OPERATOR(pg_catalog.=) 'open'"

_IS_FREE = "CASE WHEN pg_catalog.pg_try_advisory_lock_shared({0}) THEN pg_catalog.pg_advisory_unlock_shared({1}) ELSE false END"
_HAS_MOVED = (
    f"SELECT {_IS_FREE.format('CAST({0} AS bigint)', 'CAST({1} AS bigint)')} OR {_IS_FREE.format(_AHEAD, _AHEAD)}"
)
# The new sign is locked before the old one is unlocked, so that there is always one. The subquery is evaluated first, because it
# contains a volatile function.
_GIVE_SIGN = (
    f", pg_catalog.set_config('{_SIGN}', CASE WHEN pg_catalog.pg_try_advisory_lock_shared(s.key) THEN s.key::text ELSE '' END, false),"
    f" pg_catalog.pg_advisory_unlock_shared(s.before) FROM (SELECT CAST({{2}} AS bigint) + {_SIGNS} + {_SECOND} AS key,"
    f" NULLIF(pg_catalog.current_setting('{_SIGN}', true), '')::bigint AS before) AS s"
)

_SET_TIMEOUT = "pg_catalog.set_config('lock_timeout', '{ms}', true)"
# pg_sleep(0) checks for interrupts, as in `advisory`.
_LOCK_ONE = (
    f"{_SET_TIMEOUT}, pg_catalog.pg_advisory_xact_lock{{mode}}({{key}}), pg_catalog.pg_sleep(0),"
    " pg_catalog.pg_advisory_lock{mode}({key})"
)
_EACH = (
    "FOREACH k IN ARRAY {keys} LOOP {do}(k){then}; END LOOP;"
    " FOREACH k IN ARRAY {pairs} LOOP {do}((k >> 32)::integer, ((k << 32) >> 32)::integer){then}; END LOOP;"
)
_WAIT_EACH = {"do": "PERFORM pg_catalog.pg_advisory_xact_lock", "then": ""}
_LOCK_EACH = (
    "(SELECT pg_catalog.count(pg_catalog.pg_advisory_lock(u.v)) FROM pg_catalog.unnest(keys) AS u(v)),"
    " (SELECT pg_catalog.count(pg_catalog.pg_advisory_lock((u.v >> 32)::integer, ((u.v << 32) >> 32)::integer))"
    " FROM pg_catalog.unnest(pairs) AS u(v))"
)


def build_wait_for_turn(
    keys: Sequence[LockKey], milliseconds: int, *, has_ticket: bool, looks: bool = False
) -> tuple[str, ...]:
    """Return the statements that take a ticket if needed and wait for the turn. The last one returns a row if it is the turn.

    A DO block takes no parameters, so it contains the numbers as int64 literals, and nothing else from outside. With `looks`, the
    waiter skips the tickets ahead after the wait if their owners have stopped.
    """
    numbers = {
        "base": f"'{find_queue(keys)}'::bigint",
        "ms": int(milliseconds),
        "counter_ms": max(int(milliseconds), _COUNTER_MS),
    }
    look = _PASS_STOPPED.format(ms=BETWEEN_SLICES_MS) if looks else "NULL;"
    wait = _WAIT_FOR_TURN.format(**numbers, look=look)
    return (wait, _IS_TURN) if has_ticket else (_TAKE_TICKET.format(**numbers), wait, _IS_TURN)


def build_look(base: int, front: int, style: ParamStyle, *, gives_sign: bool) -> tuple[str, tuple[object, ...]]:
    """Return the statement with which a waiter that sleeps looks whether the queue has moved, and its parameters.

    The queue has moved if the first ticket, or the one ahead, is no longer held. With `gives_sign`, the waiter also shows
    that it has not stopped.
    """
    marks = [mark(style, n) for n in (1, 2, 3)]
    if gives_sign:
        return (_HAS_MOVED + _GIVE_SIGN).format(*marks), (front, front, base)
    return _HAS_MOVED.format(*marks), (front, front)


def build_wait_for_batch(keys: Sequence[LockKey], milliseconds: int) -> tuple[str, ...]:
    """Return the statements that wait until the first waiting writer has its turn. The last one returns a row if it has."""
    key = f"'{find_queue(keys) + _BATCH}'::bigint"
    return _WAIT_FOR_BATCH.format(ms=int(milliseconds), key=key), _IS_OPEN


def build_batch(keys: Sequence[LockKey], style: ParamStyle, *, closed: bool) -> tuple[str, tuple[object, ...]]:
    """Return the statement with which the first waiting writer closes the batch or opens it, and its parameter."""
    function = "pg_try_advisory_lock" if closed else "pg_advisory_unlock"
    return f"SELECT pg_catalog.{function}(CAST({mark(style, 1)} AS bigint))", (find_queue(keys) + _BATCH,)


def build_wait_for_keys(keys: Sequence[LockKey], milliseconds: int, *, shared: bool = False) -> tuple[str, ...]:
    """Return the statements that lock all keys or none, and return the ticket. The last one returns a row if they are locked.

    The wait for each key is limited to `milliseconds`. The shared mode takes a single key.
    """
    ms = int(milliseconds)
    if (key := _quote_single(keys, pairs=shared)) is not None:
        before, locks = "", _LOCK_ONE.format(ms=ms, key=key, mode="_shared" if shared else "")
    else:
        arrays = "keys := {keys}; pairs := {pairs};".format(**_quote_arrays(keys))
        waits = _EACH.format(keys="keys", pairs="pairs", **_WAIT_EACH)
        before, locks = f"{arrays} PERFORM {_SET_TIMEOUT.format(ms=ms)}; {waits}", _LOCK_EACH
    return _WAIT_FOR_KEYS.format(before=before, locks=locks), _IS_GRANTED


def _quote_single(keys: Sequence[LockKey], *, pairs: bool = False) -> str | None:
    """Return the only key as arguments of a lock function, or None if there are several, or if it is a pair unless `pairs`."""
    if len(keys) != 1:
        return None
    if keys[0].space == "bigint":
        return f"'{int(keys[0].value)}'::bigint"
    return "{:d}, {:d}".format(*keys[0].halves) if pairs else None


def _quote_arrays(keys: Sequence[LockKey]) -> dict[str, str]:
    """Return the keys as two SQL arrays: bigints and pairs."""
    whole, pairs = build_arguments(keys)
    numbers = {"keys": whole, "pairs": pairs}
    return {name: "'{" + ",".join(map(str, map(int, some))) + "}'::bigint[]" for name, some in numbers.items()}
