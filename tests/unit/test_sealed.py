"""Seals: an object that no rank of this run has sent is not read."""

import pickle

import pytest
import torch
import torch.distributed as dist

from framework.comm.objects import SEAL_BYTES, Board, seal, seal_text, unseal, unseal_text
from framework.errors import ConnectionFailed


class Opens:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (open, (str(self.file), "w"))


@pytest.mark.parametrize("obj", [None, "text", {"a": (1, [2.5])}, b"\0" * 1000])
def test_an_object_comes_as_it_was(obj):
    assert unseal(seal(obj, b"secret"), b"secret") == obj


@pytest.mark.parametrize("secret", [b"", b"another"])
def test_a_pickle_under_another_secret_is_not_run(tmp_path, secret):
    with pytest.raises(ConnectionFailed, match="not written by a rank of this run"):
        unseal(seal(Opens(tmp_path / "opened"), secret), b"secret")
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize("position", [0, SEAL_BYTES, -1])
def test_a_changed_byte_is_seen(position):
    data = seal({"step": 5}, b"secret")
    data[position] ^= 1
    with pytest.raises(ConnectionFailed):
        unseal(data, b"secret")


@pytest.mark.parametrize("num_bytes", [0, 1, SEAL_BYTES])
def test_what_is_too_short_is_refused(num_bytes):
    with pytest.raises(ConnectionFailed):
        unseal(torch.zeros(num_bytes, dtype=torch.uint8), b"secret")


@pytest.mark.parametrize(
    "forged", [b"", b"alarm", b"\xff\xfe \xff", pickle.dumps(5), seal_text("alarm", b"another").encode()]
)
def test_a_board_shows_what_its_ranks_have_written(forged):
    store = dist.HashStore()
    board = Board(store, 0, 2, b"secret")
    Board(store, 1, 2, b"secret").write("größe")
    store.set("line 0", forged)
    store.set("alarm", forged)
    assert board.read([0, 1]) == [None, "größe"]
    assert board.find_alarm() is None
    assert unseal_text(forged, b"secret") is None
