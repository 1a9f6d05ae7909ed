"""Lines of .jsonl, .jsonl.gz and .jsonl.zst files as numbered records, and what is wrong with bad files."""

import gzip
from pathlib import Path

import pytest
import zstandard
from test_corpus import one_line

from nanorl.data.corpus import read_records

TEXTS = [f"{i * i}" * 50 for i in range(2000)]
LINES = "".join(f'{{"text": "{text}"}}\n' for text in TEXTS).encode()

each_kind = pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])


def write(path: Path, data: bytes) -> Path:
    """The data, compressed as the name says."""
    path.write_bytes({".zst": zstandard.compress, ".gz": gzip.compress}.get(path.suffix, bytes)(data))
    return path


@each_kind
def test_records_are_numbered_by_line(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, '{"n": 1}\n\n{"n": "\u00e9"}\n  \n{"n": 5}'.encode())  # no newline at the end
    assert list(read_records(path)) == [(1, {"n": 1}), (3, {"n": "\u00e9"}), (5, {"n": 5})]
    assert list(read_records(path, lines=3)) == [(1, {"n": 1}), (3, {"n": "\u00e9"})]  # empty lines count
    assert list(read_records(path, lines=4)) == list(read_records(path, lines=3))
    assert list(read_records(path, lines=0)) == []


@each_kind
def test_a_long_file_is_read_to_its_end(tmp_path: Path, name: str) -> None:
    assert [record["text"] for _, record in read_records(write(tmp_path / name, LINES))] == TEXTS


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_parts_compressed_one_by_one_and_lines_across_them(tmp_path: Path, name: str) -> None:
    data = b'{"n": "first"}\n{"n": "second"}\n'
    one, two = (write(tmp_path / name, part).read_bytes() for part in (data[:9], data[9:]))
    (tmp_path / name).write_bytes(one + two)
    assert list(read_records(tmp_path / name)) == [(1, {"n": "first"}), (2, {"n": "second"})]


@each_kind
@pytest.mark.parametrize(("line", "reason"), [
    (b'{"n": ', "not JSON"), (b'{"n": "\xff"}', "not JSON"), (b"[1, 2]", "a JSON list where an object was expected"),
])
def test_a_bad_line_is_named(tmp_path: Path, name: str, line: bytes, reason: str) -> None:
    path = write(tmp_path / name, b'{"n": 1}\n\n' + line + b"\n")
    with pytest.raises(ValueError) as error:
        list(read_records(path))
    one_line(error, f"{path}:3: {reason}", "fix or delete the line")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_a_file_that_ends_early_is_an_error_after_its_whole_lines(tmp_path: Path, name: str, keep: float) -> None:
    path = write(tmp_path / name, LINES)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    read = []
    with pytest.raises(ValueError) as error:
        for _, record in read_records(path):
            read.append(record["text"])
    one_line(error, f"{path} is truncated", "download it again")
    assert read == TEXTS[: len(read)] and len(read) < len(TEXTS)


@pytest.mark.parametrize("place", [0, 1, 2, 60, -6])  # the magic number, the method, the text, the checksum
def test_a_damaged_gz_file_is_an_error(tmp_path: Path, place: int) -> None:
    path = write(tmp_path / "a.jsonl.gz", LINES)
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(ValueError) as error:
        list(read_records(path))
    one_line(error, f"{path} is truncated or damaged", "download it again")


@each_kind
def test_a_missing_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError) as error:
        list(read_records(tmp_path / name))
    one_line(error, f"{name} does not exist", "check the path")
