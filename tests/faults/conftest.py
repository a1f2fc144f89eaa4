"""An object store for the tests of this folder."""

import socket
import subprocess
import sys
import time

import pytest

SERVER_S = 60.0


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """An endpoint with S3's protocol, and a bucket. Variables of the processes that use it."""
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
    with pytest.MonkeyPatch.context() as patch, open(tmp_path_factory.mktemp("moto") / "log", "w") as log:
        for name, value in variables.items():
            patch.setenv(name, value)
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_for(port)
            import s3fs

            s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
            yield s3fs.S3FileSystem(use_listings_cache=False)
        finally:
            server.kill()
            server.wait()


def wait_for(port):
    until = time.monotonic() + SERVER_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < until, "moto does not answer"
            time.sleep(0.1)
