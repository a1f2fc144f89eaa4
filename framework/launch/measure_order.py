"""What `meshwright doctor --measure` has its ranks measure, as the file that it hands them. Without torch: ranks read it before
they import that."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Order:
    """What ranks are to measure. device: cpu or cuda; ranks: that have the node's cores, or its GPUs, for themselves; crowd: that
    are started, on CPUs more, which share the cores while messages are measured once more; threads: of a rank; cores: of the
    node; dtypes: of matmuls, as recipes name them, and of attention; folder: where checkpoints would lie; result: the file that
    rank 0 writes; effort: keys of `timings.Effort`."""

    device: str
    ranks: int
    crowd: int
    threads: int
    cores: int
    dtypes: Sequence[str]
    folder: str
    result: str
    effort: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """Write the order where ranks read it."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
