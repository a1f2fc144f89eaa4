"""One rank of `meshwright doctor --measure`: `python -m framework.launch.measure_rank ORDER`, a file that says what to measure.

Torch is imported late: how many threads it may use is read from the environment at that time.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

from framework.errors import EXIT_DONE
from framework.launch.measure_order import Order
from framework.launch.process import let_threads_sleep, report_error, run_process

CONNECT_WITHIN_S = 300.0


def main(path: Path) -> int:
    """Measure as the rank that the environment says, to the exit code; an error is said, not raised."""
    order = Order(**json.loads(path.read_text(encoding="utf-8")))
    os.environ["OMP_NUM_THREADS"] = str(order.threads)
    if order.device == "cpu":
        let_threads_sleep()
    try:
        _measure(order)
    except Exception as error:
        return report_error(error)
    return EXIT_DONE


def _measure(order: Order) -> None:
    import torch

    from framework.comm.connect import choose_device, connect
    from framework.launch.measurements import measure
    from framework.mesh.topology import Topology

    torch.set_num_threads(order.threads)
    mesh = connect(Topology(tp=order.ranks), choose_device(order.device), timeout_s=CONNECT_WITHIN_S)
    measured = measure(order, mesh)
    if mesh.rank == 0:
        Path(order.result).write_text(json.dumps(measured), encoding="utf-8")
    mesh.close()


if __name__ == "__main__":
    run_process(partial(main, Path(sys.argv[1])))
