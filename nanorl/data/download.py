"""A URL or a file on the Hugging Face hub -> a named local file.

The download goes to `<path>.part` beside its goal, with a progress bar. A broken one is taken up where it
stopped by the next call, and the file takes its name only when it is whole, so a name always stands for a
complete file.

A large file of the hub is checked by the checksum that the hub states for it.

Simplified: no retries (call again) and no login (public files only). Of a file without a checksum, a change at
its source between two tries is not noticed.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import urllib.error
import urllib.request
from pathlib import Path

from tqdm import tqdm

HUB = "https://huggingface.co/"
READ_BYTES = 1 << 20
TIMEOUT_SECONDS = 30


def fetch(url: str, path: str | Path, sha256: str | None = None, progress: bool = True) -> Path:
    """Download `url` to `path`, unless it is there already, and return the path.

    url: http:// or https://, or hf://owner/name/file (a model's file) or hf://datasets/owner/name/file.
    sha256: the checksum in hex that the file must have; where None, that which the hub states, if it does.

    Raises ValueError for another kind of address and for a wrong checksum (a download that has one is
    removed), OSError where the server refuses or the connection breaks (what arrived is kept for the next
    call).
    """
    path = Path(path)
    address = resolve(url)
    if path.exists():
        if sha256 is not None and (found := file_sha256(path)) != sha256.lower():
            raise ValueError(f"{path} has sha256 {found}, not {sha256}; delete it to download it again")
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        stated = _download(address, part, progress)
    except urllib.error.HTTPError as error:
        error.close()
        raise OSError(f"{address}: HTTP {error.code} {error.reason}; check the address") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error or type(error).__name__
        raise OSError(
            f"{address}: {reason}; check network and disk and run again, it goes on from "
            f"{part.name}, or put the file at {path} yourself"
        ) from None
    except ValueError as error:
        raise ValueError(f"cannot download {url} ({error}); correct the address") from None
    sha256 = sha256 or stated
    if sha256 is not None and (found := file_sha256(part)) != sha256.lower():
        part.unlink()
        raise ValueError(
            f"{address} has sha256 {found}, not {sha256}; the source has changed or the download "
            "is damaged: run again, or correct the checksum"
        )
    os.replace(part, path)
    return path


def resolve(url: str) -> str:
    """The http(s) address of `url`; ValueError for another kind of address."""
    if re.match(r"https?://[^/]", url):
        return url
    parts = url.removeprefix("hf://").split("/")
    depth = 3 if parts[0] == "datasets" else 2  # parts before the file's path
    if not url.startswith("hf://") or len(parts) <= depth or not all(parts):
        raise ValueError(
            f"cannot download {url}; give http://, https://, hf://owner/name/file or "
            "hf://datasets/owner/name/file"
        )
    return f"{HUB}{'/'.join(parts[:depth])}/resolve/main/{'/'.join(parts[depth:])}"


def file_sha256(path: Path) -> str:
    """The file's SHA-256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _HubRedirect(urllib.request.HTTPRedirectHandler):
    """Follows the hub to where a large file lies, and notes the checksum that the hub states for it."""

    stated: str | None = None

    def redirect_request(self, request, file, code, message, headers, url):
        if match := re.fullmatch(r'"?([0-9a-f]{64})"?', headers.get("X-Linked-ETag", "")):
            self.stated = match[1]
        return super().redirect_request(request, file, code, message, headers, url)


def _download(address: str, part: Path, progress: bool) -> str | None:
    """Bring `part` from however many bytes it has to the whole file, and to the disk; the SHA-256 that the hub states
    for it, if it does."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(address, headers={"User-Agent": "nanorl"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    redirect = _HubRedirect()
    try:
        response = urllib.request.build_opener(redirect).open(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:  # 416: nothing comes after the bytes that are here
            raise
        error.close()
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return redirect.stated  # they are the whole file
        part.unlink()
        return _download(address, part, progress)
    with response:
        if have and not (response.headers.get("Content-Range") or "").startswith(f"bytes {have}-"):
            have = 0  # the server sends the file from its start
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        bar = tqdm(desc=part.stem, total=total, initial=have, unit="B", unit_scale=True, disable=not progress)
        with part.open("ab" if have else "wb") as file, bar:
            while data := response.read(READ_BYTES):
                file.write(data)
                have += len(data)
                bar.update(len(data))
            file.flush()
            os.fsync(file.fileno())
    if total is not None and have != total:
        raise OSError(f"the connection broke at {have} of {total} bytes")
    return redirect.stated
