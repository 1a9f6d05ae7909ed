"""Downloads from a server on this machine: whole, resumed, refused, broken, wrong."""

import hashlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from nanorl.data.download import fetch, resolve

BODY = bytes(range(256)) * 40  # 10,240 bytes
SHA = hashlib.sha256(BODY).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Serves BODY at /file, at /no-range without resuming, and at /broken half of what it promises; /hub/<checksum>
    leads to /file as the hub leads to a large file."""

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        if self.path == "/missing":
            self.send_error(404)
            return
        if self.path.startswith("/hub/"):
            self.send_response(302)
            self.send_header("Location", "/file")
            self.send_header("X-Linked-ETag", f'"{self.path[5:]}"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and self.path != "/no-range" else 0
        if start >= len(BODY):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(BODY)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = BODY[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(BODY) - 1}/{len(BODY)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if self.path == "/broken" else body)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[ThreadingHTTPServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.ranges = []
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def one_line(error: pytest.ExceptionInfo, *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_fetch_and_keep(server, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.bin"
    assert fetch(f"{server.url}/file", path, sha256=SHA.upper(), progress=False) == path
    assert path.read_bytes() == BODY
    assert list(path.parent.iterdir()) == [path]  # no .part left
    fetch(f"{server.url}/file", path, sha256=SHA, progress=False)
    assert server.ranges == [None]  # what is here is not asked for again


def test_progress_bar(server, tmp_path: Path, capsys) -> None:
    fetch(f"{server.url}/file", tmp_path / "file.bin")
    assert "file.bin: 100%" in capsys.readouterr().err


def test_resume(server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(BODY[:3000])
    fetch(f"{server.url}/file", tmp_path / "file.bin", sha256=SHA, progress=False)
    assert server.ranges == ["bytes=3000-"]
    assert (tmp_path / "file.bin").read_bytes() == BODY


def test_a_broken_connection_keeps_what_came(server, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    with pytest.raises(OSError) as error:
        fetch(f"{server.url}/broken", path, progress=False)
    one_line(error, f"{server.url}/broken", "5120 of 10240 bytes", "run again")
    assert not path.exists() and (tmp_path / "file.bin.part").read_bytes() == BODY[:5120]
    fetch(f"{server.url}/file", path, sha256=SHA, progress=False)
    assert server.ranges == [None, "bytes=5120-"]
    assert path.read_bytes() == BODY


def test_a_server_that_cannot_resume_starts_over(server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(b"x" * 3000)
    fetch(f"{server.url}/no-range", tmp_path / "file.bin", sha256=SHA, progress=False)
    assert server.ranges == ["bytes=3000-"]
    assert (tmp_path / "file.bin").read_bytes() == BODY


@pytest.mark.parametrize("part, requests", [(BODY, 1), (BODY + b"too long", 2)])
def test_nothing_left_to_ask_for(server, tmp_path: Path, part: bytes, requests: int) -> None:
    (tmp_path / "file.bin.part").write_bytes(part)
    fetch(f"{server.url}/file", tmp_path / "file.bin", sha256=SHA, progress=False)
    assert (tmp_path / "file.bin").read_bytes() == BODY
    assert len(server.ranges) == requests


def test_wrong_checksum(server, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    with pytest.raises(ValueError) as error:
        fetch(f"{server.url}/file", path, sha256="0" * 64, progress=False)
    one_line(error, SHA, "0" * 64, "run again")
    assert not list(tmp_path.iterdir())
    path.write_bytes(b"mine")
    with pytest.raises(ValueError) as error:
        fetch(f"{server.url}/file", path, sha256=SHA, progress=False)
    one_line(error, "file.bin", SHA, "delete it")
    assert path.read_bytes() == b"mine"


def test_the_checksum_that_the_hub_states(server, tmp_path: Path) -> None:
    fetch(f"{server.url}/hub/{SHA}", tmp_path / "right.bin", progress=False)
    assert (tmp_path / "right.bin").read_bytes() == BODY
    (tmp_path / "whole.bin.part").write_bytes(BODY)
    fetch(f"{server.url}/hub/{SHA}", tmp_path / "whole.bin", progress=False)
    for start in (b"", BODY[:-1], BODY):
        (tmp_path / "wrong.bin.part").write_bytes(start)
        with pytest.raises(ValueError) as error:
            fetch(f"{server.url}/hub/{'0' * 64}", tmp_path / "wrong.bin", progress=False)
        one_line(error, SHA, "0" * 64)
        assert not list(tmp_path.glob("wrong*"))
    fetch(f"{server.url}/hub/a-git-hash", tmp_path / "small.bin", progress=False)
    fetch(f"{server.url}/hub/{'0' * 64}", tmp_path / "given.bin", SHA, progress=False)  # what the caller says counts


def test_refused(server, tmp_path: Path) -> None:
    with pytest.raises(OSError) as error:
        fetch(f"{server.url}/missing", tmp_path / "file.bin", progress=False)
    one_line(error, "/missing: HTTP 404", "check the address")
    assert not list(tmp_path.iterdir())


def test_no_server(server, tmp_path: Path) -> None:
    url = server.url
    server.shutdown()
    server.server_close()
    with pytest.raises(OSError) as error:
        fetch(f"{url}/file", tmp_path / "file.bin", progress=False)
    one_line(error, url, "check network", "file.bin")


def test_addresses() -> None:
    hub = "https://huggingface.co"
    assert resolve("https://a.org/b.txt") == "https://a.org/b.txt"
    assert resolve("hf://openai-community/gpt2/config.json") == (
        f"{hub}/openai-community/gpt2/resolve/main/config.json"
    )
    assert resolve("hf://datasets/openai/gsm8k/main/test.parquet") == (
        f"{hub}/datasets/openai/gsm8k/resolve/main/main/test.parquet"
    )
    bad = [
        "ftp://a.org/b",
        "file:///etc/hosts",
        "b.txt",
        "http://",
        "hf://gpt2",
        "hf://a/b",
        "hf://datasets/a/b",
        "hf://a//b",
    ]
    for url in bad:
        with pytest.raises(ValueError) as error:
            resolve(url)
        one_line(error, f"cannot download {url}; give http://")
