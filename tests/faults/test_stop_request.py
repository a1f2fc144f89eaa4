"""A request to stop is a flag while it is listened to, and nothing afterwards."""

import multiprocessing
import os
import signal

import pytest

from framework.monitor.progress import STOP_SIGNALS, StopRequest


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_only_sets_the_flag_and_is_given_back(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(number) is before


def test_under_nohup_a_closed_terminal_asks_for_nothing():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, former)


def interrupt_twice():
    with StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        os._exit(0)


def test_second_interrupt_ends_the_process_at_once():
    process = multiprocessing.get_context("fork").Process(target=interrupt_twice)
    process.start()
    process.join(10)
    assert process.exitcode == 128 + signal.SIGINT
