"""Loading libraries that take seconds: torch and transformers."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading_libraries() -> Iterator[None]:
    """Context for imports of torch and transformers: the garbage collector pauses, and leaves their objects alone from then on.

    They make 360,000 objects that stay until the process ends. The collector would look through them 900 times while they load
    (0.65 of 3.0 s of CPU; one core of a shared EPYC), once more in each of its full rounds, and again at the end of the process
    (0.7 s). Frozen they cost 8 MB more, which is the garbage among them. Nothing happens where transformers is loaded already:
    objects alive by then are not a library's.
    """
    if "transformers" in sys.modules:
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
