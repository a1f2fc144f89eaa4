"""Random recipes through `meshwright verify`: does any layout come out as another training run, and is it one?

Run `python scripts/sweep_layouts.py --draws 100 [--first N] [--only WORD ...]`: one line per draw with its number, exit code
and arguments, what `verify` printed where it is not plainly equal, and a count. --first N --draws 1 repeats draw N; --only
keeps draws that have all these words.

A draw is a family with its default config, a layout of at most 4 ranks, an optimizer, a precision and sizes down to two
tokens a sequence. A layout that the family does not take is exit code 86 and says nothing.
"""

import argparse
import contextlib
import io
import json
import random
import shlex
import tempfile
import time
from collections import Counter
from pathlib import Path

from framework.cli import main as meshwright

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "phi",
    "phi3",
    "gpt2",
    "gpt_neox",
    "gpt_neo",
    "gptj",
    "opt",
    "bloom",
    "falcon",
    "starcoder2",
    "stablelm",
    "cohere",
    "olmo2",
    "granite",
    "glm",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "deepseek_v3",
    "granitemoe",
)
MAX_RANKS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="N")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD")
    arguments = parser.parse_args()
    codes: Counter[int] = Counter()
    for number in range(arguments.first, arguments.first + arguments.draws):
        config, options = draw(random.Random(number))
        words = shlex.join([json.dumps(config), *options])
        if all(word in words for word in arguments.only):
            code, printed, seconds = run(config, options)
            codes[code] += 1
            print(f"{number:4d} exit {code:2d} {seconds:4.1f} s  {words}", flush=True)
            if code not in (0, 86) or "rounding" in printed.split("quantity")[-1] or arguments.draws == 1:
                print(printed, flush=True)
    print(", ".join(f"exit {code}: {count}" for code, count in sorted(codes.items())))


def run(config: dict[str, object], options: list[str]) -> tuple[int, str, float]:
    """(exit code, what was printed, seconds)."""
    printed, start_s = io.StringIO(), time.monotonic()
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        Path(file.name).write_text(json.dumps(config))
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = meshwright(["verify", "--model-config", file.name, *options])
    return code, printed.getvalue(), time.monotonic() - start_s


def draw(rng: random.Random) -> tuple[dict[str, object], list[str]]:
    """A Hugging Face config and the arguments of one `verify`."""
    config = {"model_type": rng.choice(FAMILIES)}
    tp, pp, dp = rng.choice([each for each in degrees() if each[0] * each[1] * each[2] <= MAX_RANKS])
    rows, accumulation = rng.choice([1, 2]), rng.choice([1, 2, 3])
    sequence = rng.choice(["true", "false"])
    words = {
        "train.seed": rng.randrange(1000),
        "launch.ranks": tp * pp * dp,
        "parallel.tp": tp,
        "parallel.pp": pp,
        "parallel.sequence": sequence,
        "parallel.overlap": rng.choice(["auto", "always"]) if tp > 1 and sequence == "true" else "auto",
        "batch.sequences_per_microbatch": rows,
        "batch.sequences_per_step": rows * accumulation * dp,
        "batch.context": rng.choice([2, 2, 3, 8, 17, 32]),
        "memory.activation_checkpointing": rng.choice(["none", "full"]),
        "memory.chunked_loss": rng.choice(["true", "false"]),
        **draw_zero(rng),
        **draw_optimizer(rng),
    }
    precision = ["--fp64"] if rng.random() < 0.4 else []
    return config, [*(f"{key}={value}" for key, value in words.items()), *precision]


def degrees() -> list[tuple[int, int, int]]:
    """(tp, pp, dp); tensor parallelism has more ways to round than the others, and two of three draws."""
    some = [(tp, pp, dp) for tp in (1, 2, 4) for pp in (1, 2) for dp in (1, 2, 3, 4)]
    return some + 2 * [each for each in some if each[0] > 1]


def draw_zero(rng: random.Random) -> dict[str, object]:
    stage = rng.choice([0, 1, 2, 3])
    local = stage > 1 and rng.random() < 0.3
    return {"zero.stage": stage, "zero.accumulate": "local" if local else "sharded"}


def draw_optimizer(rng: random.Random) -> dict[str, object]:
    return {
        "optim.name": rng.choice(["adamw", "lion", "lion", "sgd"]),
        "optim.lr": rng.choice([1e-3, 1e-2]),
        "optim.weight_decay": rng.choice([0.0, 0.3]),
        "optim.clip_norm": rng.choice(["null", 1e-3, 1.0]),
    }


if __name__ == "__main__":
    started_s = time.monotonic()
    main()
    print(f"{time.monotonic() - started_s:.0f} s")
