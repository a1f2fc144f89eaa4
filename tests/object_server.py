"""An object store with S3's protocol, as moto serves it on a port of this machine."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SERVER_S = 60.0


@contextmanager
def serve_s3(log: Path) -> Iterator[dict[str, str]]:
    """A store with the bucket `bucket`. Yields the variables that processes need; this one has them while it lasts. log: a file
    for what the server says. Skips the test where s3fs or moto are not installed."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }
    with pytest.MonkeyPatch.context() as patch, open(log, "w") as said:
        for name, value in variables.items():
            patch.setenv(name, value)
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=said, stderr=said)
        try:
            _wait_for(port)
            import s3fs

            s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
            yield variables
        finally:
            server.kill()
            server.wait()


def _wait_for(port: int) -> None:
    until = time.monotonic() + SERVER_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < until, "moto does not answer"
            time.sleep(0.1)
