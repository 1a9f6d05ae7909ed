"""Where the tests find public data that the project does not carry, and how hypothesis behaves."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

PROJECT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("NANORL_TEST_DATA") or PROJECT.parent / "shared" / "data")
if (SHARED / "tiktoken_cache").is_dir():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))

# The same examples each time, whatever the machine is busy with, and no .hypothesis folder.
settings.register_profile("nanorl", deadline=None, derandomize=True, database=None)
settings.load_profile("nanorl")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public test data; skips where there is none."""
    if not SHARED.is_dir():
        pytest.skip(f"no test data at {SHARED}; set NANORL_TEST_DATA to the folder that holds it")
    return SHARED


@pytest.fixture(scope="session")
def r50k():
    """The r50k_base tokenizer; skips where its ranks are not on this machine."""
    from nanorl.tokenizer import Tokenizer

    if "TIKTOKEN_CACHE_DIR" not in os.environ:
        pytest.skip("the ranks of r50k_base are not here; set TIKTOKEN_CACHE_DIR to a folder that holds them")
    return Tokenizer.r50k_base()
