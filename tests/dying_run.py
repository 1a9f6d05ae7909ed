"""The command line, on ranks one of which dies: `torchrun ... dying_run.py kill 1:3 -- sft ...`

Rank 1 is killed by SIGKILL as it closes step 3; with `raise` in place of `kill` it fails with an error of its own.
Once torchrun has started them again the ranks are left alone.
"""

import os
import signal
import sys
from collections.abc import Iterator
from unittest.mock import patch

from nanorl import distributed
from nanorl.__main__ import main
from nanorl.train.progress import Run

how, death, *words = sys.argv[1:]
close_step = Run.close_step


def close(run: Run, record: dict, samples: tuple = ()) -> Iterator[dict]:
    """`Run.close_step`, which the rank whose turn it is does not live to begin."""
    if death == f"{distributed.rank()}:{record['step']}" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if how == "raise":
            raise KeyError("apples")
        print(f"rank {distributed.rank()} is killed in step {record['step']}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    yield from close_step(run, record, samples)


if __name__ == "__main__":
    with patch.object(Run, "close_step", close):
        sys.exit(main(words))
