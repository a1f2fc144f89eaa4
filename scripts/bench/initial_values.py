"""Seconds and peak memory of one rank's initial values, in a layout of any size: no other rank is needed.

    python scripts/bench/initial_values.py [--rank 64] [--threads 1] [recipe keys, as `meshwright train` takes them]

The default is a rank in the middle of Llama 3.1 70B over 128: 16 stages, ZeRO 3 over 8. CPU seconds are those of all threads.
"""

import argparse
import resource
import time

import torch

from framework.model.load import load_config
from framework.plan.plan import make_plan
from framework.recipe.compose import compose
from framework.train.build import materialize

LLAMA_70B = ("model=llama3_1_70b", "parallel.pp=16", "launch.ranks=128", "zero=stage_3", "precision=fp32")
BATCH = ("batch.context=4096", "batch.sequences_per_step=512", "batch.tokens_per_step=null")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    recipe = compose([*LLAMA_70B, *BATCH, *options.overrides]).require()
    plan = make_plan(recipe, load_config(recipe.model))
    own = plan.of_rank(options.rank)

    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, used = time.perf_counter(), time.process_time()
    by_stage = [materialize(plan, {}, stage, torch.device("cpu"), False, []) for stage in own.stages]
    wall, used = time.perf_counter() - wall, time.process_time() - used
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib

    held_gb = sum(buffer.master.nbytes for buffers in by_stage for buffer in buffers) / 1e9
    print(
        f"{', '.join(unit.name for stage in own.stages for unit in stage.units)}: {held_gb:.2f} GB of this rank's own"
    )
    print(f"{wall:.1f} s, {used:.1f} CPU s: {wall / held_gb:.2f} s per GB, {used / held_gb:.2f} CPU s per GB")
    print(f"peak memory of it {peak_kib / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
