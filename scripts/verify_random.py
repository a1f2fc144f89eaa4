"""200 random recipes on at most 8 ranks, each beside stock Hugging Face: is any layout another training run?

    python scripts/verify_random.py [--seed S] [OVERRIDE ...]                  meshwright verify --random 200, about half an hour
    python scripts/verify_random.py --end-to-end N [--seed S] [OVERRIDE ...]   N whole runs, from text to export

It ends with the seconds of a draw, or with the first failure and the one command that repeats it (docs/verify.md). A whole run is
that of `meshwright verify --end-to-end`; its ranks are one pool of processes, which import torch once for all draws.
"""

import io
import os
import socket
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from framework.cli import main
from framework.errors import EXIT_DONE, EXIT_FAILED
from framework.launch import local
from framework.launch.agent import Outcome
from framework.lease import Lease
from framework.train import program
from framework.verify.campaign import Campaign, verify_random
from framework.verify.command import Verification
from framework.verify.compare import exceeds, render
from framework.verify.end_to_end import TOLERANCE, compare_runs
from framework.verify.pool import RankPool


def train_in_pool(number: int, world: int, rendezvous: str, run: str, epoch: int, port: int) -> tuple[int, str]:
    """Body: one rank of a run, as the launcher starts it; its exit code and what it has printed."""
    said, place = io.StringIO(), {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {
        name: str(value) for name, value in {**place, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items()
    }
    with redirect_stdout(said), redirect_stderr(said):
        code = program.main(Path(run), Lease(Path(run), epoch))
    return code, said.getvalue()


def run_in_pool(pool: RankPool, arguments: Sequence[str], num_ranks: int, *_: Any) -> Outcome:
    """The place of `run_ranks`: arguments are those of `python -m framework.train.program`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ended = pool.run(num_ranks, train_in_pool, arguments[-2], int(arguments[-1]), port, timeout_s=300)
    code = max(code for code, _ in ended)
    return Outcome(code, "\n".join(said for each, said in ended if each == code) if code else "")


def judge(prepared: Verification) -> int:
    """Whether a draw's whole run is the reference's."""
    assert prepared.sides.pool is not None, "a campaign has a pool"
    with patch.object(local, "run_ranks", partial(run_in_pool, prepared.sides.pool)):
        rows = compare_runs(prepared.sides, main)
    print(render(rows, TOLERANCE))
    return EXIT_FAILED if exceeds(rows, TOLERANCE) else EXIT_DONE


if __name__ == "__main__":
    parser = ArgumentParser(allow_abbrev=False)
    parser.add_argument("--end-to-end", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    arguments, overrides = parser.parse_known_args()
    if arguments.end_to_end is None:
        sys.exit(main(["verify", "--random", "200", *sys.argv[1:]]))
    given = ["precision=fp64", *overrides]
    sys.exit(verify_random(Campaign(arguments.end_to_end, arguments.seed, 2, overrides=given, judge=judge)))
