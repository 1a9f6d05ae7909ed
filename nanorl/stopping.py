"""Leaving when asked: SIGTERM or Ctrl-C lets a run finish its step and save; asked again, it leaves at once.

    with listening() as stop:
        for step in ...:
            ...
            if stop.due():          # every rank asks, at the same place, and gets the same answer
                save(...)
                stop.leave("saved")

One Ctrl-C can reach a process more than once: from the terminal, and from the launcher that the terminal told as well.
So what comes within a second of the first signal is taken for the same wish.

In a notebook an interrupt of the kernel is a Ctrl-C. The exit status of the command line is 130 after Ctrl-C and 143
after SIGTERM, as shells have it.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nanorl import distributed

SAME_WISH = 1.0  # seconds


class Stopped(KeyboardInterrupt):
    """A run was asked to stop, and has saved. `status` is the exit status for it."""

    def __init__(self, text: str, status: int):
        super().__init__(text)
        self.status = status


class Stop:
    """Whether this process has been asked to stop."""

    def __init__(self):
        self.asked = 0  # the number of the signal that this rank or another was sent
        self.heard_at: float | None = None  # when this process heard its first

    def due(self) -> bool:
        """Whether any rank has been asked. A call for all ranks."""
        asked = max(distributed.gather_objects([self.asked]))
        if asked:  # else a signal may have come meanwhile, for the next call
            self.asked = asked
        return bool(asked)

    def leave(self, text: str) -> None:
        """Raise `Stopped`, after `due` has been true."""
        raise Stopped(text, 128 + self.asked)

    def _hear(self, number: int, _: object) -> None:
        if self.heard_at is None:
            self.heard_at = time.monotonic()
            self.asked = self.asked or number
        elif time.monotonic() - self.heard_at > SAME_WISH:
            raise KeyboardInterrupt


@contextmanager
def listening() -> Iterator[Stop]:
    """Note SIGINT and SIGTERM instead of being ended by them; what was done about them before is put back at the end.

    Only Python's main thread can listen; elsewhere nothing is changed and nothing is heard.
    """
    stop, before = Stop(), {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, stop._hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
