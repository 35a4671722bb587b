"""What the handles of a client say about themselves, sampled every 5 ms."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from cluster.records import Belief, Grant, describe_error

if TYPE_CHECKING:
    from cluster.records import Recorder

_EVERY = 0.005


class Watched:
    """A handle that is being sampled."""

    def __init__(self, recorder: Recorder, handle: Any, limit: int, what: dict[str, Any]) -> None:
        self.handle = handle
        self.who: str = what["who"]
        self.told: float | None = None
        self.start = self.end = time.monotonic()
        self._recorder = recorder
        self._limit = limit
        self._what = what

    def sample(self) -> None:
        """Note that the handle is held, if it says so."""
        # The state is asked for after the clock: if it is held then, it was held at this moment, too.
        now = time.monotonic()
        if self.handle.state in {"held", "unknown"}:
            self.end = now

    def note_loss(self) -> None:
        """Note when the callback was called."""
        self.told = time.monotonic()

    def write(self, how: str, error: BaseException | None = None) -> None:
        """Write the record of this belief."""
        self._recorder.write(
            Belief,
            **self._what,
            start=self.start,
            end=self.end,
            how=how,
            limit=self._limit,
            told=self.told,
            reason=self.handle.loss_reason,
            failure=None if error is None else describe_error(error),
        )


class Beliefs:
    """The handles of a client."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._lock = threading.Lock()
        self._watched: set[Watched] = set()
        threading.Thread(target=self._run, daemon=True, name="beliefs").start()

    def _run(self) -> None:
        while True:
            # Inside the lock, so that no sample is taken after `drop`: the handle may still say that it is held while it is released.
            with self._lock:
                for each in self._watched:
                    each.sample()
            time.sleep(_EVERY)

    def watch(self, handle: Any, kind: str, name: str, who: str, *, asked: float, limit: int = 1) -> Watched:
        """Record a grant, and sample it from now on."""
        resource, token = None, None
        if hasattr(handle, "token"):
            ((resource, token),) = handle._own_tokens.items()
        slot = handle.slot.isoformat() if kind == "slot" else None
        what = {"kind": kind, "name": name, "who": who, "token": token, "slot": slot}
        watched = Watched(self._recorder, handle, limit, what)
        self._recorder.write(Grant, **what, resource=resource, asked=asked)
        handle.on_lost(watched.note_loss)
        with self._lock:
            self._watched.add(watched)
        return watched

    def drop(self, watched: Watched) -> None:
        """Stop sampling. Call it before the release: the client does not count on the lock any more."""
        with self._lock:
            self._watched.discard(watched)

    def close(self) -> None:
        """Write the records of those that the end of the client interrupts."""
        with self._lock:
            for each in self._watched:
                each.write("unfinished")
            self._watched.clear()
