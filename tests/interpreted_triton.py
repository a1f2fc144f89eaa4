"""Triton, where `make develop` puts it: beside the environment, not in it, or torch and transformers would import it wherever
they find it. On CPUs its kernels are interpreted, tensor by tensor, with NumPy."""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from framework.comm.fused import Fused

FOLDER = Path(sys.prefix) / "triton"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def interpreted_triton() -> Iterator[None]:
    """A context in which Triton and our kernels are imported anew, to be interpreted; on GPUs they compile. Not to be nested."""
    interprets = {} if DEVICE.type == "cuda" else {"TRITON_INTERPRET": "1"}
    others = _take_modules() if interprets else {}
    with patch.object(sys, "path", [*sys.path, str(FOLDER)]), patch.dict(os.environ, interprets):
        yield
    if interprets:
        # Nobody else is to find kernels that were made for the interpreter.
        _take_modules()
        sys.modules.update(others)


def _take_modules() -> dict[str, ModuleType]:
    # A process loads the library in C once only.
    python = [name for name in sys.modules if not name.startswith("triton._C")]
    names = [name for name in python if name.split(".")[0] == "triton" or ".triton_" in name]
    return {name: sys.modules.pop(name) for name in names}


def fused_kernels() -> AbstractContextManager[Any]:
    """A context, within the one above, in which every device is given the kernels in Triton."""
    return patch.object(Fused, "on", lambda fused, device: fused.load())
