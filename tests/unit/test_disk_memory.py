"""States on a disk: over a whole run, its start included, memory has the ring of them, and at most a unit's values."""

import gc
import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from unittest.mock import patch

import torch

from framework.optim import disk_ring
from framework.plan.plan import Plan
from framework.recipe.schema import Offload
from framework.train.step import TrainingRun, train_step
from tests.grid import IN_TURN
from tests.unit.test_activation_checkpointing import memory_of, plan_of, start

pytestmark = IN_TURN

NUM_LAYERS = 6
# A unit's states are twenty chunks.
WIDTHS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
CHUNK_BYTES = 1 << 18
# Numbers of a step's, such as its sums.
SMALL = 1 << 16


def plan_with(offload: Offload) -> Plan:
    return plan_of(replace(memory_of("full"), offload=offload), NUM_LAYERS, WIDTHS)


def follow(plan: Plan, folder: Path) -> tuple[TrainingRun, list[int]]:
    """A run of two steps, and the bytes that torch has allocated after each allocation, since before it was built."""
    gc.collect()
    with torch.profiler.profile(profile_memory=True) as profile:
        run, microbatches = start(plan)
        train_step(run, microbatches, 1, 1e-3)
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    sizes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return run, list(accumulate(size for _, size in sizes))


def test_a_whole_run_has_no_more_of_its_states_in_memory_than_the_ring_and_a_unit(tmp_path: Path) -> None:
    """The ring's buffers are not torch's: they are what the plan counts on the host."""
    with patch.object(disk_ring, "CHUNK_BYTES", CHUNK_BYTES):
        in_memory, live_in_memory = follow(plan_with(Offload()), tmp_path)
        plan = plan_with(Offload(1.0, home="disk", disk_path=str(tmp_path)))
        run, live = follow(plan, tmp_path)
        planned = plan.memory(0)
    masters = [buffer.master.nbytes for buffer in in_memory.buffers]
    states, unit = 3 * sum(masters), max(masters)
    assert unit < 0.1 * states
    assert max(live) <= planned.allocated + unit + SMALL
    assert max(live_in_memory) - max(live) >= states - unit
    # Between steps there is not even a unit.
    assert live_in_memory[-1] - live[-1] >= states
    assert run.disk is not None
    assert planned.host == run.disk.host_bytes < 7 * CHUNK_BYTES
    run.close()
