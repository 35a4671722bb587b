"""`IdempotentEffect`: effects outside the database, for threads."""

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
    """Do something outside the database once, however often it is requested, and return the same result each time.

    ::

        def work(attempt: Attempt) -> str:
            return attempt.step("charge", lambda key: provider.charge(amount, key))


        receipt = IdempotentEffect(engine, order.key, scope="orders", result=str).run(work)

    The key is claimed first, in a separate transaction. Then the function runs, outside any transaction of pgfence, and its
    result is stored. While the function runs, a thread renews the claim.

    Guarantees: among all callers with the same key and scope, at most one has the claim on the key at a time, and at most one
    result is stored. Later callers get an equal result of the same type. If an attempt dies, the first call after its claim has
    expired starts another attempt, which reuses the saved steps. If the first attempt then continues, its results are rejected.
    No connection is held while the function runs.

    Limitations: a step may be done twice. An attempt may die after it has done a step and before the step is saved, so a
    provider that does not honour the derived key of the step may execute the step twice; see `Attempt.step`. Use
    `takeover=False` for such a provider.

    After a result or an error listed in `record`, the key is done. After an error listed in `free`, the next caller runs
    immediately. After any other error, a cancellation or a crash, the outcome is unknown, and the claim is left to expire.
    Whatever `record` and `free` contain, the claim is also left to expire if something was done whose result may not have been
    stored, if a step is still running in another thread or task, or if the attempt was lost. pgfence errors count only if one of
    their classes is listed; `Exception` does not include them.

    Args:
        engine: an Engine, or a function that returns one. The tables must exist; run `pgfence install`.
        key: the text that the client sends again with each retry, from 1 to 255 characters long and without control characters.
        scope: text that names the operation and the owner of the key, with the same limits as the key. Two clients that must not
            see each other's results need different scopes. Do not use the same scope with `idempotent`.
        payload: the value that must be equal in all requests with the same key, compared as by `idempotent`. None means that
            nothing is compared.
        result: the type of the result. Dataclasses and models in the result, or in what a step returns, can be stored only if
            this type contains their classes; see `idempotent`.
        ttl: seconds after which the claim of a dead attempt expires, from 0.3 s to a day (a timedelta may be longer). The TTL
            does not limit how long the work takes.
        keep: seconds for which the result is kept after the work has ended, and for which the steps of a lost attempt are kept
            after its claim has ended. `keep` must be at least the TTL. When `keep` has passed, the key counts as new and its steps
            are deleted, so `keep` must be longer than the time for which the client retries.
        timeout: seconds to wait for a running attempt; 0 means not to wait.
        record: exception classes whose errors count as results. Such an error is stored, and raised again each time. `record`
            takes precedence over `free`.
        free: exception classes that mean that nothing was done, or that repeating the work is harmless.
        takeover: whether another attempt follows a lost attempt. With False, calls raise AttemptLostError, because the outcome is
            unknown, until an operator frees the key or `keep` has passed.

    Raises:
        TypeError, ValueError: an argument is unusable; nothing was sent.
    """

    _engines = SYNC_ENGINES

    def run(self, fn: Callable[[Attempt], T], /) -> T:
        """Run a function in a new attempt, or return the result that an earlier attempt has stored. `run` may be called repeatedly.

        Args:
            fn: called with the attempt.

        Raises:
            IdempotencyKeyReusedError: the key belongs to a finished or running request with another payload. Respond with 422.
            IdempotencyInProgressError: another attempt is running; or it ended with the error `ended_with`, or its process died,
                and its claim has not expired yet; or a transaction of `idempotent` has the key. Respond with 409. `retry_after`
                is the number of seconds after which to retry.
            AttemptLostError: this attempt is no longer valid; or, with `takeover=False`, an earlier attempt was lost.
            IdempotencyMisuseError: the result is not of the type `result`, or cannot be stored. If the annotation shows that,
                the error is raised before the function runs. Otherwise, the work was done, and other callers do not get its
                result. The error is also raised if the key was used over HTTP, or if the transaction of `Attempt.complete` was not
                committed.
            UnreachableError: the server did not respond, or all `max_lock_connections` were in use. If this happened before the
                function ran, nothing was done. If it happened after that, the result is stored in the background if the server
                recovers in time, and calling again is safe.
            SchemaError: pgfence's tables are missing or older than version 2, or this role may not use them.
            StandbyError, UnsupportedServerError: no key can be claimed on this server.
            TypeError: `fn` is a coroutine or generator function.
            ValueError: the encoding of the database cannot represent the key or the result.
            Exception: the error that the function raised, with a note that says what happens to the key; or the recorded error.
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
