"""The share of devices' peak (plan/machine.py) that a run's useful FLOPs reach: MFU (model/flops.py counts these)."""


def mfu(tokens_per_s: float, flops_per_token: float, num_devices: int, peak: float | None) -> float | None:
    """Share of the peak of all devices, 0 to 1, that useful FLOPs reach; None without a known peak."""
    return None if peak is None else tokens_per_s * flops_per_token / (num_devices * peak)
