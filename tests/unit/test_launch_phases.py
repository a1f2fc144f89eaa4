"""The bar before the first step: on a terminal it names each phase and vanishes, in a log it is silent."""

import io

import pytest

from framework.launch.phases import BUILD, RANK_PHASES, PhaseBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_every_phase_and_then_an_empty_line() -> None:
    stream = Terminal()
    bar = PhaseBar(RANK_PHASES, stream)
    for phase in RANK_PHASES:
        bar.begin(phase)
    bar.close()
    bar.close()
    places = [stream.getvalue().index(phase) for phase in RANK_PHASES]
    assert places == sorted(places)
    assert "3/4" in stream.getvalue()[places[-1] :]
    assert stream.getvalue().rpartition("\r")[0].rpartition("\r")[2].strip() == ""


@pytest.mark.parametrize(("phases", "stream"), [(RANK_PHASES, io.StringIO()), ((), Terminal())])
def test_a_log_and_a_rank_without_phases_are_silent(phases: tuple[str, ...], stream: io.StringIO) -> None:
    bar = PhaseBar(phases, stream)
    bar.begin(BUILD)
    bar.close()
    assert stream.getvalue() == ""
