"""Claim the key of a request, and end the claim with the request, for both middlewares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._http import answers
from pgfence.effects._claim import StoredResult
from pgfence.effects._manager import EffectManager
from pgfence.effects._running import claim
from pgfence.errors import AttemptLostError

if TYPE_CHECKING:
    from pgfence._http.rules import Environ, HttpRequest, Rules
    from pgfence.effects._claim import EffectKey, Reply
    from pgfence.effects._running import RunningAttempt
    from pgfence.lease._engines import EngineFinder

_HANDLED = "pgfence.idempotency"
"""The key in an environment under which a middleware stores the marker of the request that it handles."""


class RequestMarker:
    """Marks an environment and its copies as handled by an outer IdempotencyMiddleware until that middleware has finished."""

    __slots__ = ("_keys", "ended", "skips_recording")

    def __init__(self, request: HttpRequest) -> None:
        self._keys = request.keys
        self.ended = False
        self.skips_recording = False
        """Whether to leave the response unrecorded, even if responses with its status are normally recorded."""

    def mark(self, environ: Environ) -> None:
        """Put the marker into an environment."""
        environ[_HANDLED] = self

    @staticmethod
    def skip_recording(environ: Environ) -> None:
        """Keep the response from being stored, because it would be replayed even after an operator has fixed the cause."""
        found = environ.get(_HANDLED)
        if isinstance(found, RequestMarker):
            found.skips_recording = True

    @staticmethod
    def is_marked(environ: Environ, request: HttpRequest) -> bool:
        """Return whether an outer middleware is handling this request, so that its key is already claimed."""
        found = environ.get(_HANDLED)
        # A second call with the scope of a finished request, for example to retry it, is not inside that request.
        return isinstance(found, RequestMarker) and not found.ended and found._keys == request.keys


async def claim_key(engine: EngineFinder, wanted: EffectKey, request: HttpRequest) -> RunningAttempt | Reply:
    """Claim the key of a request, or return what was recorded under it.

    Raises:
        PgfenceError: the key could not be claimed.
        ProblemResponse: the server has rejected the claim.
    """
    try:
        manager, place = engine.find_manager(EffectManager)
        found = await claim(manager, place, wanted, 0)
    except Exception as error:
        if refusal := answers.find_claim_problem(error, str(request)):
            raise refusal from error
        raise
    return answers.build_replay(found) if isinstance(found, StoredResult) else found


class Exchange:
    """The handling of one request whose key is claimed, between the server and the application."""

    def __init__(self, running: RunningAttempt, rules: Rules, request: HttpRequest) -> None:
        self._running, self._rules, self._request = running, rules, request
        self._chunks: list[bytes] = []
        self._size = 0
        self._gone = False
        """Whether the client has disconnected."""
        self._marker = RequestMarker(request)

    async def store(self, reply: Reply) -> Reply | None:
        """Store a response, and return the response to send instead if this attempt was superseded."""
        self._marker.ended = True
        try:
            await self._running.finish_reply(reply)
        except AttemptLostError as error:
            return answers.build_refusal(error, str(self._request))
        except Exception:
            # The work is done, so its response is sent even though no later request can get it.
            answers.log.exception("%s: the response could not be stored", self._request)
        return None

    async def fail(self, how: str) -> None:
        """End the attempt without storing a response, unless the attempt has already ended."""
        if self._marker.ended:
            return
        self._marker.ended = True
        if not self._rules.free_on_failure:
            row = await self._running.lapse(how)
            answers.log_lapse(self._request, self._running.describe_lapse(how, row))
            return
        try:
            await self._running.free()
        except Exception:
            answers.log.exception("%s: the key could not be freed", self._request)

    def interrupt(self, how: str) -> None:
        """End the attempt after an interrupt or a cancellation, which must not wait for the server."""
        self._marker.ended = True
        self._running.let_lapse(how)
        answers.log_lapse(self._request, self._running.describe_lapse(how))
