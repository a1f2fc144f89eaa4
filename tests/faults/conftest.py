"""An object store for the tests of this folder."""

import pytest

from tests.object_server import serve_s3


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """An endpoint with S3's protocol, and a bucket. Variables of the processes that use it."""
    with serve_s3(tmp_path_factory.mktemp("moto") / "log"):
        import s3fs

        yield s3fs.S3FileSystem(use_listings_cache=False)
