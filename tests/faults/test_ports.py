"""The ports of a run: none is reached from outside, and what strangers write there neither runs nor ends a thing."""

import json
import os
import pickle
import random
import socket
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from framework.errors import EXIT_RESUME
from framework.launch.agent import run_ranks
from framework.monitor.hang import TRAINING, Alarm
from tests.faults.test_launch_agent import PROGRAM, are_ready, wait_for

LISTENS = "0A"


def listeners(pids):
    """(process, address, port) of each TCP socket that processes listen on."""
    owner = {}
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                owner[os.readlink(link)] = pid
    found = []
    for family, kind in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and (pid := owner.get(f"socket:[{words[9]}]")):
                address, port = words[1].split(":")
                packed = b"".join(struct.pack("=I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8))
                found.append((pid, socket.inet_ntop(kind, packed), int(port, 16)))
    return found


class Opens:
    """Makes a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (open, (str(self.file), "w"))


def attack(place, seed):
    """Random bytes, half messages, huge lengths, a pickle, and many connections that say nothing."""
    rng = random.Random(seed)
    texts = [rng.randbytes(size) for size in (1, 3, 8, 64, 4096)]
    texts += [struct.pack("<Q", number) for number in range(8)]  # gloo's pairs have such numbers
    texts += [bytes([query]) + struct.pack("<Q", 2**63 - 1) for query in range(16)]
    texts += [
        b"\x00\x3c\x85\xf7\x3c" + bytes([query]) + struct.pack("<Q", size) for query in range(16) for size in (2**40, 5)
    ]
    texts += [b"GET / HTTP/1.1\r\n\r\n", pickle.dumps(Opens(Path("opened").absolute()))]
    kept = [socket.create_connection(place, 5) for _ in range(50)]
    for text in texts:
        with suppress(OSError), socket.create_connection(place, 5) as stranger:
            stranger.sendall(text)
            stranger.settimeout(0.02)
            stranger.recv(1)
    for stranger in kept:
        stranger.close()


def forge(port, folder):
    """What a stranger who speaks the store's protocol can write: an alarm, and pickles in all that is there."""
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=10), False)
    alarm = Alarm(0, TRAINING, "step", 5, 100.0, 1.0, "launch.step_deadline_s")
    store.set("watch/alarm", alarm.to_json())
    store.set("watch/verdict", "the end")
    store.set("torch.rendezvous.ranks", pickle.dumps(Opens(folder / "opened")))


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """A run of two ranks that a stranger attacks: how it ended, its listeners, and what the stranger met."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    found, errors = [], []

    def disturb():
        try:
            wait_for(lambda: are_ready(tmp_path))
            pids = [os.getpid(), *(int((tmp_path / f"ready-{rank}").read_text()) for rank in range(2))]
            assert all(b"GLOO_SOCKET_IFNAME=lo" in Path(f"/proc/{pid}/environ").read_bytes() for pid in pids[1:])
            found.extend(listeners(pids))
            for seed, (_, address, port) in enumerate(found):
                attack((address, port), seed)
            stores = [port for pid, _, port in found if pid == os.getpid()]
            assert len(stores) == 1, found
            forge(stores[0], tmp_path)
            time.sleep(3)  # every rank looks at the board each second
        except BaseException as error:
            errors.append(error)
        finally:
            os.kill(os.getpid(), 15)

    threading.Thread(target=disturb, daemon=True).start()
    words = ("-P", str(PROGRAM), "add_until_asked", str(tmp_path))
    outcome = run_ranks(words, 2, tmp_path / "log", {"PYTHONPATH": str(PROGRAM.parents[2])})
    return outcome, found, errors


@pytest.mark.grid
def test_a_stranger_at_the_ports_of_two_ranks_ends_and_runs_nothing(ended, tmp_path):
    outcome, found, errors = ended
    assert errors == []
    assert (outcome.code, outcome.message) == (EXIT_RESUME, "")
    assert not (tmp_path / "opened").exists()
    assert found
    assert {address for _, address, _ in found} == {"127.0.0.1"}
    assert {line["rank"] for line in json.loads((tmp_path / "ranks.json").read_text())["ranks"]} == {0, 1}
