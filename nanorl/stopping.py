"""Leaving when asked: SIGTERM or Ctrl-C lets a run finish or give up its step and save; asked again, it leaves at once.

    with listening() as stop:
        for step in ...:
            with together():        # long work: given up on every rank as soon as one is asked
                for token in ...:
                    check()
            ...
            if stop.due():          # every rank asks, at the same place, and gets the same answer
                save(...)
                stop.leave("saved")

One Ctrl-C can reach a process more than once: from the terminal, and from the launcher that the terminal told as well.
So what comes within a second of the first signal is taken for the same wish. Processes that `launch` started learn
from a file what their launcher was asked, which works on every system.

In a notebook an interrupt of the kernel is a Ctrl-C. The exit status of the command line is 130 after Ctrl-C and 143
after SIGTERM, as shells have it.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanorl import distributed

SAME_WISH = 1.0  # seconds
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A run was asked to stop, and has saved. `status` is the exit status for it."""

    def __init__(self, text: str, status: int):
        super().__init__(text)
        self.status = status


class GivenUp(KeyboardInterrupt):
    """A piece of work was left in its middle, because a rank was asked to stop."""


class Stop:
    """Whether this process has been asked to stop."""

    def __init__(self):
        self.heard = 0  # the number of the signal that this rank or another was sent
        self.heard_at: float | None = None  # when this process heard its first

    @property
    def asked(self) -> int:
        """The number of the signal that this process was sent, or its launcher; 0 where neither was."""
        return self.heard or _read(_notice)

    def due(self) -> bool:
        """Whether any rank has been asked. A call for all ranks."""
        asked = max(distributed.gather_objects([self.asked]))
        if asked:  # else a signal may have come meanwhile, for the next call
            self.heard = asked
        return bool(asked)

    def leave(self, text: str) -> None:
        """Raise `Stopped`, after `due` has been true."""
        raise Stopped(text, 128 + self.asked)

    def _hear(self, number: int, _: object) -> None:
        if self.heard_at is None:
            self.heard_at = time.monotonic()
            self.heard = self.heard or number
        elif time.monotonic() - self.heard_at > SAME_WISH:
            raise KeyboardInterrupt


_listening: list[Stop] = []  # the innermost is the last
_notice: Path | None = None  # where the launcher of this process writes what it is asked


@contextmanager
def listening() -> Iterator[Stop]:
    """Note SIGINT and SIGTERM instead of being ended by them; what was done about them before is put back at the end.

    Only Python's main thread can listen; elsewhere nothing is changed and no signal is heard.
    """
    stop, before = Stop(), {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, stop._hear) for number in SIGNALS}
    _listening.append(stop)
    try:
        yield stop
    finally:
        _listening.remove(stop)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def together() -> Iterator[None]:
    """A piece of work that every rank does for itself, without talking to others, and that `check` may cut short.

    A call for all ranks: raises `GivenUp` on each of them if any has been asked to stop. Does nothing where nobody
    listens.
    """
    try:
        yield
    except GivenUp:  # here; the others are told below
        pass
    if _listening and _listening[-1].due():
        raise GivenUp("asked to stop")


def check() -> None:
    """Raise `GivenUp` if this process has been asked to stop. Cheap: may stand in a loop over tokens."""
    if _listening and _listening[-1].asked:
        raise GivenUp("asked to stop")


# ---- processes of a launcher ----------------------------------------------------------------------------

def heed(notice: Path) -> None:
    """Look for the launcher's wish, the number of a signal, in this file from now on. Until a run listens, a signal
    ends this process."""
    global _notice
    _notice = notice
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)


def ignore() -> None:
    """Hear no signal any more: for a process of a launcher, which is about to end."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _read(notice: Path | None) -> int:
    return int(notice.read_text(encoding="utf-8")) if notice is not None and notice.is_file() else 0
