"""IdempotentEffect, for threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._api.inputs import EngineSource
from pgfence._process.coroutines import run_sync
from pgfence.effects._claim import StoredResult
from pgfence.effects._handles import Attempt, check_plain_function, check_value
from pgfence.effects._request import EffectOptions, T
from pgfence.lease._engines import SYNC_ENGINES

if TYPE_CHECKING:
    from collections.abc import Callable


class IdempotentEffect(EffectOptions[EngineSource, T]):
    """Do something outside of the database once, however often it is requested, and return the same result each time.

    ::

        def work(attempt: Attempt) -> str:
            return attempt.step("charge", lambda key: provider.charge(amount, idempotency_key=key))


        receipt = IdempotentEffect(engine, order.key, scope="orders", result=str).run(work)

    The key is claimed first, in a separate commit; then the function runs, outside of any transaction of ours; then its result
    is stored. While it runs, a thread renews the claim.

    Guarantees: of all callers with the same key and scope, one runs at a time, and at most one result is stored; later callers
    get it, equal and of the same type. If an attempt dies, another one follows when its claim has expired, with the steps that
    were saved; if the first one comes back late, it is rejected. No connection is held while the function runs.

    Limitations: something may be done twice. An attempt may die after it did something and before that is saved, so a provider
    that does not honour the derived key of a step may do it twice; see `Attempt.step`. Use `takeover=False` for such a provider.

    How an attempt ends: with a result or an error of `record`, the key is done; with an error of `free`, the next caller runs at
    once. After any other error, a cancel or a crash it is not known what was done, and the claim stays until it expires. It also
    stays, whatever `record` and `free` say, if something was done that is not known to be saved, if a step is still running in
    another thread or task, or if the attempt was lost; and errors of pgfence count only if one of its classes is named, not by
    `Exception`.

    Args:
        engine: an Engine, or a function that returns one. The tables must be there: `pgfence install`.
        key: what the client repeats with the request: 1 to 255 characters, without control characters.
        scope: whose key it is and for what: the same rules. Never the same for two clients that must not see each other's
            answers, and never one that `idempotent` is used with.
        payload: what must be equal in all requests with the same key; compared by its fingerprint. None compares nothing.
        result: the type of the result, and of what steps return; see `idempotent`.
        ttl: seconds that a claim outlives a dead attempt, 0.3 to a day. Not how long the work takes.
        keep: seconds from the end of the work on for which the result is kept, at least the ttl; of an attempt that was lost,
            from the end of its claim on for which its steps are. After that the key is new again, with its steps: it has to
            outlast the client's retries.
        timeout: seconds to wait for an attempt that is running; 0 does not wait.
        record: classes of errors that count as results: stored, and raised again each time. They come before `free`.
        free: classes of errors after which it is known that nothing was done, or that doing it again does no harm.
        takeover: whether an attempt that was lost is followed by another one. False: until an operator has freed the key, or
            its time (`keep`) is over, calls raise AttemptLostError, because it is not known what it did.

    Raises:
        TypeError, ValueError: an argument is unusable; before anything was sent.
    """

    _engines = SYNC_ENGINES

    def run(self, fn: Callable[[Attempt], T], /) -> T:
        """Run a function in a new attempt, or return the result that an earlier one has stored. May be called again.

        Args:
            fn: gets the attempt.

        Raises:
            IdempotencyKeyReusedError: the key belongs to another payload, done or in progress. 422.
            IdempotencyInProgressError: another attempt runs, or ended with an error and its claim is not over: `ended_with`. 409.
                `retry_after` says when to ask again.
            AttemptLostError: this attempt does not count any more; or, with `takeover=False`, one before it was lost.
            IdempotencyMisuseError: the result is not of the type of `result`, or cannot be stored: where the annotation of the
                function tells, before it runs. After that it is not known to others that the work was done.
            UnreachableError: no answer: before the function, nothing was done; after it, the result is stored in the background
                if the server comes back in time, and to ask again is safe.
            SchemaError: pgfence's tables are missing, or older than version 2.
            StandbyError: the server is a standby.
            TypeError: it is a coroutine or generator function.
            Exception: what the function raised, with a note that says what happens to the key; or the recorded error.
        """
        check_plain_function(fn)
        self._check_function(fn)
        running = run_sync(self._claim)
        if isinstance(running, StoredResult):
            return self._replay(running)
        attempt = Attempt(running, self._codec, self._check_function)
        try:
            value = check_value(fn(attempt), fn)
        except BaseException as error:
            run_sync(self._fail, attempt, error)
            raise
        return run_sync(self._succeed, attempt, value)
