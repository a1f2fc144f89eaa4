"""An object store with S3's protocol, as moto serves it on a port of this machine; on demand as slow as one far away.

`python -m tests.object_server PORT LATENCY_S ERRORS` serves it: each request waits, and a share of the gets fails.
"""

import random
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
def serve_s3(log: Path, latency_s: float = 0.0, errors: float = 0.0) -> Iterator[dict[str, str]]:
    """A store with the bucket `bucket`. Yields the variables that processes need; this one has them while it lasts. log: a file
    for what the server says; errors: the share of gets that are answered by 503. Skips the test where s3fs or moto are not
    installed."""
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
        command = [sys.executable, "-m", "tests.object_server", str(port), str(latency_s), str(errors)]
        server = subprocess.Popen(command, stdout=said, stderr=said, cwd=Path(__file__).parents[1])
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


def _serve(port: int, latency_s: float, errors: float) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import run_simple

    store, drawn = DomainDispatcherApplication(create_backend_app), random.Random(0)

    def answer(environ, start):
        time.sleep(latency_s)
        if environ["REQUEST_METHOD"] == "GET" and drawn.random() < errors:
            start("503 Slow Down", [("Content-Type", "text/plain"), ("Content-Length", "0")])
            return []
        return store(environ, start)

    run_simple("127.0.0.1", port, answer, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
