"""The cluster and the desk in front of it, for as long as these tests run."""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.slurm.cluster import NODES, REPOSITORY, SCRIPT, Desk, call
from tests.tiny_run import write_corpus


def why_not() -> str | None:
    """Why there can be no cluster here."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "munged", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed: scripts/local_cluster.sh install"
    return None if os.geteuid() == 0 else "nodes are namespaces, which take root"


@pytest.fixture(scope="session")
def desk(tmp_path_factory) -> Iterator[Desk]:
    with open_desk(tmp_path_factory.mktemp("desk"), NODES) as found:
        yield found


@contextmanager
def open_desk(place: Path, num_nodes: int, **variables: str) -> Iterator[Desk]:
    """A cluster of its own, and its desk. variables: of scripts/local_cluster.sh."""
    if os.environ.get("REQUIRE_SLURM", "0") in ("", "0"):
        pytest.skip("REQUIRE_SLURM=1 runs these on a cluster of this machine")
    reason = why_not()
    if reason is not None:
        pytest.fail(f"REQUIRE_SLURM is set, but {reason}")
    write_corpus(place / "corpus")
    home = tempfile.mkdtemp(prefix="mw-slurm-", dir="/tmp")  # a socket's path is short
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("MESHWRIGHT_CLUSTER", home)
        patch.setenv("MESHWRIGHT_CLUSTER_PORT", str(free_ports(num_nodes + 1)))
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        patch.setenv("SLURM_CONF", f"{home}/slurm.conf")
        patch.setenv("OMP_NUM_THREADS", "1")
        for name, value in variables.items():
            patch.setenv(name, value)
        call(str(SCRIPT), "start", str(num_nodes))
        try:
            yield Desk(place, dict(os.environ))
        finally:
            call(str(SCRIPT), "stop")
            shutil.rmtree(home, ignore_errors=True)


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that can be had."""
    for first in range(27800, 32000, count):
        if all(is_free(port) for port in range(first, first + count)):
            return first
    raise AssertionError("no free ports")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
