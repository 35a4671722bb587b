"""The heartbeat of one engine in this process. It renews grants, ends grants past their deadline, and wakes waiters.

It has two threads. The timer decides what is due and what has expired, and aborts a statement that hangs. The worker owns the
only connection and runs one task at a time: a renewal, a check for an eviction, a release to repeat, or LISTEN.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

from pgfence._connections.background import choose_background_connection
from pgfence._holds.registry import ManagerRegistry
from pgfence._leases import terms
from pgfence._leases.grant import Pauses, ended_error, log
from pgfence._leases.heartbeat import tasks
from pgfence._leases.heartbeat.queue import RenewalQueue
from pgfence._leases.heartbeat.tasks import LINGER, ListenTask
from pgfence._process import threads
from pgfence._process.callbacks import call_logged
from pgfence._process.clock import clock
from pgfence._process.lifecycle import PROCESS, on_disposed
from pgfence._sql import addresses
from pgfence._sql.params import style_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from uuid import UUID

    from sqlalchemy import Engine

    from pgfence._connections.background import BackgroundConnection
    from pgfence._leases.grant import Grant
    from pgfence._leases.terms import LeaseKind
    from pgfence._sql.lease import LeaseResult
    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames
    from pgfence.config import Config
    from pgfence.errors import LossReason

TICK = 1.0
"""The longest sleep in seconds. It is short, because a sleeping thread does not notice that the host was suspended."""


class HeartbeatService:
    """Renews all leases that this process acquired through one engine.

    Public methods return immediately, do no I/O and can be called from any thread, but not under the mutex and not from a
    finaliser.
    """

    def __init__(self, engine: Engine, config: Config) -> None:
        self.engine = engine
        self.config = config
        self.pid = PROCESS.pid
        threads.require_native_threads()
        self._style: ParamStyle = style_of(engine.dialect)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wakes_at = 0.0
        """When the timer thread wakes up."""
        self._timer: threading.Thread | None = None
        self._queue = RenewalQueue(listens=config.pooler != "transaction")
        self._connection: BackgroundConnection | None = None
        self._task: tasks.HeartbeatTask | None = None
        """The task that the connection is running."""
        self._cut_at = math.inf
        self._needed = self._busy_at = clock()
        """The times when the connection was last needed, and when the timer thread last had a grant to watch."""
        self._thread: threading.Thread | None = None
        self._disposed = False
        self._ending = False
        self._pauses = Pauses()
        on_disposed(engine, self._on_engine_disposed)
        threads.register(self)

    # ------------------------------------------------------------ called by lease managers

    def keep(self, grant: Grant) -> None:
        """Renew a grant until it is dropped, released or lost; mark it as lost at its deadline."""
        if grant.expire():
            return
        grant.request_renewal = self._request_renewal
        with self._lock:
            self._disposed = False
            self._queue.keep(grant, now := clock())
            (self._ensure_worker if self._queue.needs_listening(now) else self._wake_timer)()

    def drop(self, grant: Grant) -> None:
        """Stop renewing a grant that was released, abandoned or handed over. Calling it again does nothing."""
        with self._lock:
            request = self._queue.drop(grant)
        if request is not None:
            request.finish(ended_error(grant))

    def note_eviction(self, place: TableNames, name: str, token: int) -> None:
        """Mark the leases of a name as evicted, up to a token, because this process has evicted their holder."""
        with self._lock:
            found = self._queue.find(place, name, token)
        self._lose([(grant, "evicted") for grant in found])

    def _lose(self, lost: Iterable[tuple[Grant, LossReason]]) -> None:
        for grant, reason in lost:
            grant.lose(reason)
            self.drop(grant)

    def renew(self, grant: Grant, ttl: float | None, done: tasks.Done) -> None:
        """Renew a grant now, on the heartbeat's connection. A new TTL applies from now on.

        `done` is called once, on a heartbeat thread; it must be quick and must not take a heartbeat lock. It receives None if the
        lease was renewed, `LockLostError` if the lease is lost, `LockNotHeldError` if it was released in the meantime,
        `UnreachableError` if the server did not respond (the lease is held until its deadline, and the heartbeat keeps trying),
        or otherwise the server's error.
        """
        with self._lock:
            known = self._queue.request_renewal(grant, ttl, done)
            if known:
                self._ensure_worker()
        if not known:
            grant.expire()
            done(ended_error(grant))

    def release_later(self, grant: Grant) -> tasks.ReleaseTask:
        """Repeat a release in the background until the server responds or the TTL is over, and return the release."""
        return self.end_later(tasks.release_of(grant))

    def forget_later(
        self, place: TableNames, name: str, lease_id: UUID, seconds: float, family: LeaseKind = "lease"
    ) -> None:
        """End a grant whose response was lost, by its id, in the background. Give up after `seconds`, the TTL of the grant."""
        args = name, name, str(lease_id)
        self.end_later(tasks.RevokeTask(place, lambda sql: sql.forget_late, args, clock() + seconds, family))

    def is_listening(self, place: TableNames) -> bool:
        """Return whether notifications of releases are expected to arrive."""
        with self._lock:
            return self._queue.listeners.is_on(place)

    def end_later(self, ending: tasks.ReleaseTask) -> tasks.ReleaseTask:
        """Send a release in the background, and repeat it until the server responds or its time is over. Return it."""
        with self._lock:
            self._queue.releases.append(ending)
            self._ensure_worker()
        return ending

    def listen(self, place: TableNames, name: str, wake: Callable[[], object]) -> Callable[[], None]:
        """Call `wake` on every release notification for `name`, and return a function that unsubscribes.

        `wake` runs on a heartbeat thread, must be quick and must not take a heartbeat lock. It is also called once when the
        connection starts to listen, because earlier notifications were missed. Through a pooler it may never be called, so
        callers must poll too.
        """
        if self.config.pooler == "transaction":
            return lambda: None
        with self._lock:
            if self._queue.listeners.add(place, name, wake):
                self._ensure_worker()

        def stop() -> None:
            with self._lock:
                self._queue.listeners.remove(place, name, wake, clock())

        return stop

    # ------------------------------------------------------------ under the lock

    def _wake_timer(self) -> None:
        """Start the timer thread, or wake it if something is due before it would wake up."""
        if self._timer is None:
            # This thread does no I/O, so a blocked event loop, an exhausted pool or a hung server cannot keep it from marking a
            # lease as lost at its deadline.
            self._timer = threads.start("pgfence-heartbeat", self._run_timer)
        elif min(self._queue.schedule.next(), self._cut_at) < self._wakes_at:
            self._changed.notify()

    def _request_renewal(self, grant: Grant) -> None:
        with self._lock:
            if self._queue.make_up(grant, clock()):
                self._wake_timer()

    def _ensure_worker(self) -> None:
        """Start the connection's thread, or wake it to look for tasks."""
        self._disposed = False
        self._wake_timer()
        if self._ending:
            return
        if self._connection is None:
            # The thread starts only when it has a task, so a lease that ends before its first renewal opens no connection.
            self._connection = choose_background_connection(self.engine, self.config, self._on_notify)
            self._thread = threads.start("pgfence-link", self._run_worker, self._connection)
        elif self._task is None:
            self._connection.wake()

    # ------------------------------------------------------------ the timer thread

    def _run_timer(self) -> None:
        while True:
            self._pauses.report(self.config.events)
            with self._lock:
                now = clock()
                due, over = self._queue.take(now)
                if due or self._queue.needs_listening(now):
                    self._ensure_worker()
                hung, stuck = self._find_hung(now)
                if not over and hung is None:
                    if len(self._queue.schedule) or self._connection is not None:
                        self._busy_at = now
                    elif self._disposed or now - self._busy_at > LINGER:
                        self._timer = None
                        return
                    self._sleep(now)
                    continue
            # The lock is not held here, because a loss calls the application's listeners, which may call the heartbeat.
            for grant, request in over:
                grant.expire()
                if request is not None:
                    request.finish(ended_error(grant))
            if hung is not None:
                # The worker cannot enforce its own time limit, because it is blocked in the driver until the socket is shut down.
                hung.abort()
            if stuck is not None:
                self._note_failure(stuck, TimeoutError("no connection in time"))

    def _find_hung(self, now: float) -> tuple[BackgroundConnection | None, tasks.HeartbeatTask | None]:
        """Return the connection whose task has exceeded its limit, and the task if the connection is still opening."""
        if now < self._cut_at or self._connection is None:
            return None, None
        self._cut_at = math.inf
        link, task = self._connection, self._task
        if link.session is not None:
            return link, None
        # A connection that is being opened has no socket yet to shut down, so its thread is abandoned. The next task starts
        # another thread, and this one ends when it finds that its connection was replaced.
        self._connection = self._task = None
        return link, task

    def _sleep(self, now: float) -> None:
        self._wakes_at = min(self._queue.schedule.next(), self._cut_at, now + TICK)
        self._changed.wait(max(0.0, self._wakes_at - now))
        self._pauses.note(clock() - self._wakes_at, self._queue.schedule)

    # ------------------------------------------------------------ the connection's thread

    def _run_worker(self, link: BackgroundConnection) -> None:
        try:
            while (step := self._choose_step(link)) is not None:
                if isinstance(step, tasks.HeartbeatTask):
                    self._run_task(link, step)
                else:
                    self._wait(link, step)
        finally:
            with self._lock:
                if self._connection is link:
                    self._connection = self._task = None
                    self._cut_at = math.inf
            link.close()

    def _wait(self, link: BackgroundConnection, seconds: float) -> None:
        try:
            link.wait(seconds)
        except Exception:  # the connection is broken, so the next task opens another connection
            log.debug("the heartbeat's connection failed while idle", exc_info=True)
            link.close_connection()

    def _run_task(self, link: BackgroundConnection, task: tasks.HeartbeatTask) -> None:
        try:
            if not link.live:
                link.open()
            if self._connection is not link:  # abandoned while opening, and another thread has the task now
                return
            task.run(
                link,
                tasks.choose_sql(task.family, task.place, self._style),
                min(self._cut_at - clock(), terms.LONGEST_STATEMENT),
            )
        except Exception as error:
            link.close_connection()
            if self._finish_task(link):
                self._note_failure(task, error)
        else:
            if self._finish_task(link):
                self._note_success(task)

    def _finish_task(self, link: BackgroundConnection) -> bool:
        """Record that the task has ended, unless the timer thread has done so and abandoned this thread."""
        with self._lock:
            if self._connection is not link:
                return False
            self._task = None
            self._cut_at = math.inf
            return True

    def _choose_step(self, link: BackgroundConnection) -> tasks.HeartbeatTask | float | None:
        """Return the next task, the seconds to wait for one, or None if the thread ends."""
        with self._lock:
            if self._connection is not link:
                return None
            now = clock()
            if not link.live:
                self._queue.listeners.reset()
            if now < self._queue.retry_at:
                return self._queue.retry_at - now
            task = self._queue.pick(now)
            if isinstance(task, ListenTask) and link.live and not link.can_listen:
                self._queue.listeners.deaf, task = True, None
            if task is not None:
                self._task = task
                self._cut_at = now + self._queue.limit(task, now)
                self._needed = now
                self._wake_timer()
                return task
            if self._queue.busy:
                self._needed = now
                return min([TICK * 60, *(max(0.0, ending.at - now) for ending in self._queue.releases)])
            if self._disposed or now - self._needed > LINGER:
                # The end is decided and recorded under one lock, so that a task that is queued later starts a new worker.
                self._connection = None
                self._changed.notify()
                return None
            return LINGER + 0.1 - (now - self._needed)

    def _note_success(self, task: tasks.HeartbeatTask) -> None:
        if self._queue.failures:
            log.info("%s is responding again", addresses.describe_server(self.engine))
        self._queue.failures = 0
        if isinstance(task, tasks.RenewTask):
            self.config.events.record("renewal", clock() - task.started)
            for grant, answer in task.results:
                self._note_renewal(task, grant, answer)
        elif isinstance(task, tasks.ReleaseTask):
            with self._lock:
                self._queue.note_released(task, clock())
        elif isinstance(task, ListenTask):
            with self._lock:
                wakes = self._queue.note_listening(task)
            for wake in wakes:
                call_logged(wake)
        elif isinstance(task, tasks.CheckTask):
            self._lose(task.lost)

    def _note_renewal(self, task: tasks.RenewTask, grant: Grant, answer: LeaseResult) -> None:
        if answer.verdict == "lost" and answer.reason is not None:
            grant.lose_rejected(answer.reason)
        elif answer.asked:
            grant.resign()
        with self._lock:
            request = self._queue.note_answer(task, grant, answer, clock())
            self._wake_timer()
        grant.expire()
        if request is not None:
            request.finish(None if grant.state == "held" else ended_error(grant))

    def _note_failure(self, task: tasks.HeartbeatTask, error: Exception) -> None:
        """Record and log a failed task, plan its retry, and finish the requests that waited for it with the error."""
        told = tasks.translate_renewal_error(error, task.place)
        with self._lock:
            requests = self._queue.note_failure(task, clock())
            if self._queue.waiting:
                self._ensure_worker()
        tasks.report_failure(self.engine, self.config.events, task, error, first=self._queue.failures == 1)
        for request in requests:
            request.finish(told)

    def _on_notify(self, channel: str, payload: str) -> None:
        with self._lock:
            wakes = self._queue.listeners.waiters_of(channel, payload)
            # A notification is only a hint, so query the server. Other schemas share the channel, and any role can notify it.
            if self._queue.check_later(channel, payload):
                self._ensure_worker()
        for wake in wakes:
            call_logged(wake)

    def _on_engine_disposed(self, _: Engine) -> None:
        """Close the connection as soon as it is not needed any more."""
        if self.pid != PROCESS.pid:
            return
        with self._lock:
            self._disposed = True
            self._changed.notify()
            if self._connection is not None:
                self._connection.wake()

    def end(self, seconds: float) -> None:
        """Send the releases that were never sent, and close the connection cleanly, because the interpreter is exiting."""
        until = clock() + seconds
        with self._lock:
            # A signal that interrupted an acquire a moment ago must not leave the lease to its TTL.
            while self._connection is not None and self._queue.has_unsent(self._task) and clock() < until:
                self._changed.wait(0.01)
            self._ending = True
            link, self._connection = self._connection, None
        if link is not None and self._thread is not None:
            link.wake()
            self._thread.join(max(0.0, until - clock()))


def heartbeat_of(engine: Engine, config: Config) -> HeartbeatService:
    """Return the heartbeat of an engine in this process. Pass the `sync_engine` of an async engine."""
    return ManagerRegistry.for_process(engine, "heartbeat", HeartbeatService, lambda: HeartbeatService(engine, config))
