from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])

class Signal:
    def connect(self, receiver: F, /) -> F: ...

worker_process_init: Signal
