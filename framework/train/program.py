"""The program of one rank: `python -m framework.train.program RUN_DIR [EPOCH]`, or `main(run_dir, lease)` in the launcher's
process when the rank is alone. EPOCH is that of the launcher's lease; in a job rank 0 takes the lease itself.

Torch is imported late: how many threads it may use is read from the environment at that time.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from framework.errors import EXIT_INTERRUPTED
from framework.faults import FaultInjector
from framework.imports import loading_libraries
from framework.launch.directory import RunDirectory
from framework.launch.process import (
    adopt_task,
    check_node,
    count_nodes,
    describe_start,
    end_hung,
    is_task,
    judge,
    limit_threads,
    may_use_gpus,
    prepare_gpu_rank,
    rank_in_environment,
    report_error,
    run_process,
    take_fingerprint,
)
from framework.lease import Lease, read_lease
from framework.monitor.progress import START_UP, PhaseBar, Phases, StopRequest
from framework.recipe.compose import load_recipe
from framework.recipe.derive import at_nodes, derive
from framework.recipe.plugins import find_changed, import_plugins

# Ranks of a job's former start, killed with their node perhaps, may take so long to vanish.
RUN_FREE_WITHIN_S = 60.0


def main(run_dir: Path, lease: Lease | None = None, report: Callable[[Exception], int] = report_error) -> int:
    """Train as the rank that the environment names and return the exit code; an error is reported, not raised.

    lease: the launcher's, None in a job. report: says the error that is being handled, and returns its exit code.
    """
    try:
        return train_as_launched(run_dir, lease)
    except KeyboardInterrupt:
        # The loop has not taken the signals over yet: there is nothing to save.
        return EXIT_INTERRUPTED
    except Exception as error:
        return report(error)


def train_as_launched(run_dir: Path, lease: Lease | None) -> int:
    """`main`, which raises its errors."""
    run, began_at = RunDirectory.open(run_dir), read_lease(run_dir)[0]
    is_in_job, is_first = is_task(), rank_in_environment() == 0
    recipe = load_recipe(run.recipe)
    if is_in_job:
        recipe = at_nodes(recipe, count_nodes())
    derived, stop = derive(recipe), None
    if is_in_job:
        adopt_task(derived)
    threads = limit_threads(recipe.launch, derived.ranks_per_node)
    if may_use_gpus(recipe.launch):
        prepare_gpu_rank()
    with ExitStack() as stack:
        stack.enter_context(run.attend())
        bar = PhaseBar(START_UP if is_first and not is_in_job else ())
        stack.callback(bar.close)
        injector = FaultInjector(run_dir, rank_in_environment()) if recipe.run.allow_faults else None
        phases = Phases(injector, bar.begin)
        if is_in_job:  # requests to stop count from now on: a time limit may be near while the ranks still connect
            stop = stack.enter_context(StopRequest())
        with loading_libraries():
            import torch

            from framework.train.rank import train_rank

            import_plugins(recipe.plugins)
        if is_first and recipe.plugins:  # a job may start long after it was submitted, and again
            print("".join(f"{line}\n" for line in find_changed(recipe.plugins, run.find_record())), end="", flush=True)
        torch.set_num_threads(threads)
        if is_in_job:
            check_node(run_dir, recipe.launch.device, began_at)
            if is_first:
                lease = stack.enter_context(run.hold(RUN_FREE_WITHIN_S, describe_start(), began_at, judge))
        else:
            lease = lease or Lease(run_dir)
        return train_rank(recipe, run_dir, stop, take_fingerprint(recipe), phases, end_hung, lease)


if __name__ == "__main__":
    path, *epoch = sys.argv[1:]
    run_process(partial(main, Path(path), Lease(Path(path), int(epoch[0])) if epoch else None))
