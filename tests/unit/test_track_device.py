"""The peak of a device by the name its driver reports, the share of it that is reached, and the peak of memory."""

import numpy as np
import pytest
import torch

from framework.host import peak_flops
from framework.train.reports import mfu, peak_memory_bytes


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A10", 125e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("NVIDIA A10G", None),
        ("cpu", None),
    ],
)
def test_the_peak_is_that_of_exactly_this_device(name, peak):
    assert peak_flops(name) == peak


def test_mfu_is_the_share_of_all_devices_and_absent_without_a_peak():
    assert mfu(tokens_per_s=1000, flops_per_token=1e9, num_devices=4, peak=1e12) == pytest.approx(0.25)
    assert mfu(tokens_per_s=1000, flops_per_token=1e9, num_devices=4, peak=None) is None


@pytest.mark.grid
def test_peak_memory_of_a_process_rises_with_what_it_touches_and_never_falls():
    before = peak_memory_bytes(torch.device("cpu"))
    block = np.ones(before, dtype=np.uint8)  # beside what the process has anyway, however far behind its peak lies
    with_block = peak_memory_bytes(torch.device("cpu"))
    del block
    assert with_block - before > 60 << 20
    assert peak_memory_bytes(torch.device("cpu")) - before > 60 << 20
