"""What `meshwright doctor --measure` has its ranks measure, as the file that it hands them. Without torch: ranks read it before
they import that."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Order:
    """The measurements to make. device: cpu or cuda; ranks: one for each GPU, or of the node's cores; threads: of a rank; dtypes:
    of matmuls, as recipes name them, and of attention; folder: where checkpoints would lie; result: the file that rank 0 writes;
    effort: keys of `timings.Effort`."""

    device: str
    ranks: int
    threads: int
    dtypes: Sequence[str]
    folder: str
    result: str
    effort: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """Write the order where ranks read it."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
