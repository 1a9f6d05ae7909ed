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


class CannotWrite(OSError):
    """A file could not be written; the message, one line, says which and why."""


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

    CannotWrite where the disk is full or the folder is read-only: then no file has changed.
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
    except CannotWrite:                              # of another file, in the block
        raise
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


def _cannot_write(path: Path, cause: OSError) -> CannotWrite:
    return CannotWrite(f"could not write {path}: {cause.strerror or cause}; free space or set NANORL_HOME to another "
                       "folder (files written before are whole)")


# ---- checksums -----------------------------------------------------------------------------------------

def manifest_of(path: Path) -> Path:
    """Where the manifest of a file is: step_000123.json beside step_000123.pt."""
    return path.with_suffix(".json")


def write_with_manifest(path: Path, write: Callable[[IO[bytes]], Any], about: dict[str, Any]) -> None:
    """A whole file, written by `write`, and beside it its manifest: `about`, the file's size and its SHA-256.

    The manifest comes first, so that the file is never there without one. Where a file that is whole is replaced the
    manifest vouches for that one too, in case the process ends between the two. CannotWrite as `whole_file`.
    """
    manifest = manifest_of(path)
    with whole_file(path) as file:
        hashing = Hashing(file)
        write(hashing)
        entry = about | {"bytes": hashing.size, "sha256": hashing.hash.hexdigest()}
        with contextlib.suppress(OSError, ValueError):
            entry["replaces"] = _checked(path, read_manifest(path))
        with whole_file(manifest) as beside:
            beside.write(json.dumps(entry, indent=2).encode())


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a file; None where there is none, or one that was not written here."""
    try:
        found = json.loads(manifest_of(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("sha256"), str) else None


def check(path: Path) -> None:
    """ValueError where a file is not what its manifest says. A file without a manifest, copied by hand, passes."""
    manifest = read_manifest(path)
    if manifest is not None:
        _checked(path, manifest)


def _checked(path: Path, manifest: dict[str, Any] | None) -> str:
    """The SHA-256 of a file; ValueError where a manifest says another."""
    found = _sha256(path)
    if manifest is not None and found not in (manifest["sha256"], manifest.get("replaces")):
        raise ValueError(f"its SHA-256 is {found[:8]}, its manifest says {manifest['sha256'][:8]}")
    return found


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sweep(folder: Path, names: str, suffix: str) -> None:
    """Delete what files called `names` (a pattern) leave: temporary files of a kill, and manifests that stand alone."""
    alone = [path for path in folder.glob(f"{names}.json") if not path.with_suffix(suffix).exists()]
    for path in [*folder.glob(f".{names}.tmp"), *alone]:
        path.unlink(missing_ok=True)


# ---- one run a folder ----------------------------------------------------------------------------------

@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes. The operating system lets go of it when the process ends, however it
    does. Within a process the newest run takes over: an older one is a generator that nobody will ask again.

    ValueError where another process holds it; CannotWrite where the folder is read-only.
    """
    path = folder.resolve() / LOCK
    older = _held.pop(path, None)
    if older is not None:
        older.release(force=True)
    held = FileLock(path, timeout=0, thread_local=False)  # a generator may be closed in another thread
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
        held.release()
        raise _cannot_write(folder, error) from None
    _held[path] = held
    try:
        yield
    finally:
        held.release()
        if _held.get(path) is held:
            del _held[path]
