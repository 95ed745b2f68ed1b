"""Ctrl-C and SIGTERM as a request that a long job heeds when it suits."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_request() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether a signal has asked for the end; a second signal acts at once.

    Outside of the main thread, where Python takes no signal handlers, nothing is ever asked for.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked: list[int] = []
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _frame: object) -> None:
        asked.append(number)
        restore()

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield lambda: bool(asked)
    finally:
        restore()
