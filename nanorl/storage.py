"""Files that are there whole or not at all, checksums, and a folder's lock.

A file is written under a temporary name in its own folder, flushed to the disk, and only then renamed, and the rename
is flushed too: a kill, a full disk or a power cut leaves what was there before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

LOCK = "run.lock"
_held: dict[Path, FileLock] = {}  # this process's own


class Hashing:
    """A file open for writing that takes the SHA-256 of what goes through it."""

    def __init__(self, file: IO[bytes]):
        self.file, self.hash, self.size = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        """Write all of `data`."""
        self.file.write(data)
        self.hash.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """An open file that appears at `path` only when it is complete and on the disk.

    OSError in one line where the disk is full or the folder cannot be written: then no file has changed.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        if os.name == "posix":                       # the rename itself must survive a power cut
            handle = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error          # torch.save hides the OSError behind a RuntimeError
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause is None:
            raise
        raise _cannot_write(path, cause) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _cannot_write(path: Path, cause: OSError) -> OSError:
    return OSError(f"could not write {path}: {cause.strerror or cause}; free space or set NANORL_HOME to another "
                   "folder (files written before are whole)")


# ---- checksums -----------------------------------------------------------------------------------------

def manifest_of(path: Path) -> Path:
    """Where the manifest of a file is: step_000123.json beside step_000123.pt."""
    return path.with_suffix(".json")


def write_with_manifest(path: Path, write: Callable[[IO[bytes]], Any], about: dict[str, Any]) -> None:
    """A whole file, written by `write`, and beside it its manifest: `about`, the file's size and its SHA-256.

    The manifest comes first, so that the file is never there without one. Where a file is replaced the manifest
    vouches for that one too, in case the process ends between the two.
    """
    manifest = manifest_of(path)
    with whole_file(path) as file:
        hashing = Hashing(file)
        write(hashing)
        entry = about | {"bytes": hashing.size, "sha256": hashing.hash.hexdigest()}
        if path.exists() and (old := read_manifest(path)):
            entry["replaces"] = old.get("sha256")
        with whole_file(manifest) as beside:
            beside.write(json.dumps(entry, indent=2).encode())


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a file; None where there is none that can be read."""
    try:
        found = json.loads(manifest_of(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def check(path: Path) -> None:
    """ValueError where a file is not what its manifest says. A file without a manifest, copied by hand, passes."""
    manifest = read_manifest(path)
    if manifest is None:
        return
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found not in (manifest.get("sha256"), manifest.get("replaces")):
        raise ValueError(f"its SHA-256 is {found[:8]}, its manifest says {str(manifest.get('sha256'))[:8]}")


def remove(path: Path) -> None:
    """Delete a file and its manifest, the file first."""
    path.unlink(missing_ok=True)
    manifest_of(path).unlink(missing_ok=True)


# ---- one run a folder ----------------------------------------------------------------------------------

@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes. The operating system lets go of it when the process ends, however it
    does. Within a process the newest run takes over: an older one is a generator that nobody will ask again.

    ValueError where another process holds it; OSError where the folder cannot be written.
    """
    path = folder.resolve() / LOCK
    older = _held.pop(path, None)
    if older is not None:
        older.release(force=True)
    held = FileLock(path, timeout=0)
    owner = path.with_suffix(".pid")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held.acquire()
        owner.write_text(str(os.getpid()), encoding="utf-8")
    except Timeout:
        who = owner.read_text(encoding="utf-8") if owner.is_file() else "unknown"
        raise ValueError(f"another run, process {who}, is using {folder}; wait for it, stop it, or choose another "
                         "--run") from None
    except OSError as error:
        raise _cannot_write(folder, error) from None
    _held[path] = held
    try:
        yield
    finally:
        held.release()
        if _held.get(path) is held:
            del _held[path]
