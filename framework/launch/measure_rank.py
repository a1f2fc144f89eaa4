"""One rank of `meshwright doctor --measure`: `python -m framework.launch.measure_rank ORDER`, a file that says what to measure.

Torch is imported late: how many threads it may use is read from the environment at that time.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from framework.errors import EXIT_DONE
from framework.launch.rank import let_threads_sleep, run_process, tell

CONNECT_WITHIN_S = 300.0


@dataclass(frozen=True)
class Order:
    """What ranks are to measure. device: cpu or cuda; threads: of a rank; cores: of the node; dtypes: of matmuls, as recipes name
    them, the first one of attention too; folder: where checkpoints would lie; result: the file that rank 0 writes; effort: keys
    of `timings.Effort`."""

    device: str
    ranks: int
    threads: int
    cores: int
    dtypes: Sequence[str]
    folder: str
    result: str
    effort: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """Write the order where ranks read it."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def main(path: Path) -> int:
    """Measure as the rank that the environment says, to the exit code; an error is said, not raised."""
    order = Order(**json.loads(path.read_text(encoding="utf-8")))
    os.environ["OMP_NUM_THREADS"] = str(order.threads)
    if order.device == "cpu":
        let_threads_sleep()
    try:
        _measure(order)
    except Exception as error:
        return tell(error)
    return EXIT_DONE


def _measure(order: Order) -> None:
    import torch

    from framework.comm.connect import choose_device, connect
    from framework.launch.measurements import measure
    from framework.mesh.topology import Topology

    torch.set_num_threads(order.threads)
    mesh = connect(Topology(dp=order.ranks), choose_device(order.device), timeout_s=CONNECT_WITHIN_S)
    measured = measure(order, mesh)
    if mesh.rank == 0:
        Path(order.result).write_text(json.dumps(measured), encoding="utf-8")
    mesh.close()


if __name__ == "__main__":
    run_process(partial(main, Path(sys.argv[1])))
