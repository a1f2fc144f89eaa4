"""A loader that reads tokens from S3, as moto serves it, slow and unreliable: after warm-up it never waits."""

import tempfile
import time
from dataclasses import replace

import pytest
import torch

from framework.data.loader import Loader
from framework.data.prepared import open_found
from framework.data.remote import GIB, Root
from scripts.bench.data import SHARD_TOKENS, write_store
from tests.object_server import serve_s3

CONTEXT, B = 4096, 4
TOKENS_PER_S = 20_000
WARM_UP, STEPS = 20, 50
CACHE_GB = 0.004


@pytest.mark.grid
def test_the_loader_never_waits_at_20k_tokens_a_second(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    local = write_store(tmp_path, SHARD_TOKENS)
    with serve_s3(tmp_path / "log", latency_s=0.05, errors=0.01):
        import s3fs

        for path in local.sources[0].folder.iterdir():
            if path.is_file() and path.name != "log":
                s3fs.S3FileSystem().put_file(str(path), f"bucket/tokens/{tmp_path.name}/{path.name}")
        found = replace(
            local, root=Root("s3://bucket/tokens", CACHE_GB), sources=(replace(local.sources[0], streams={}),)
        )
        words = {"seed": 1, "context": CONTEXT, "pack": "concat", "sequences_per_microbatch": B, "num_microbatches": 1}
        with Loader(local, **words) as expected, Loader(open_found(found), **words) as loader:
            waited, start = [], time.perf_counter()
            for step in range(STEPS):
                before = loader.data_wait_s
                batch = loader.batch(step * B)
                waited.append(loader.data_wait_s - before)
                assert torch.equal(batch[0].input_ids, expected.batch(step * B)[0].input_ids)
                time.sleep(max(0.0, start + (step + 1) * B * CONTEXT / TOKENS_PER_S - time.perf_counter()))
    assert max(waited[WARM_UP:]) < 0.01
    assert sum(path.stat().st_size for path in tmp_path.rglob("blocks-*")) <= CACHE_GB * GIB
