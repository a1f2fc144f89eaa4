"""200 random recipes on at most 8 ranks, each beside stock Hugging Face: is any layout another training run?

Run `python scripts/verify_random.py [--seed S] [OVERRIDE ...]`: `meshwright verify --random 200`, about half an hour. It ends
with the seconds of a draw, or with the first failure and the one command that repeats it (docs/verify.md).
"""

import sys

from framework.cli import main

if __name__ == "__main__":
    sys.exit(main(["verify", "--random", "200", *sys.argv[1:]]))
