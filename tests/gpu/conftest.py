"""The GPU that these tests run on. Where there is none they are collected, skipped, and say so."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if os.environ.get("REQUIRE_GPU", "0") not in ("", "0"):
        pytest.fail("REQUIRE_GPU is set, but torch sees no CUDA device")
    pytest.skip("no CUDA device: not run on a GPU")


@pytest.fixture(scope="session")
def two_gpus(device: torch.device) -> int:
    """The number of ranks of a world over NCCL, which wants a GPU for each."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device: NCCL between ranks not run")
    return 2
