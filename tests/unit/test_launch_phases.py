"""The bar before the first step: on a terminal it names each phase and vanishes, in a log it is silent."""

import io

import pytest

from framework.monitor.progress import START_UP, Phase, PhaseBar, Phases


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_every_phase_and_then_an_empty_line() -> None:
    stream = Terminal()
    bar = PhaseBar(START_UP, stream)
    for phase in START_UP:
        bar.begin(phase)
    bar.close()
    bar.close()
    places = [stream.getvalue().index(phase) for phase in START_UP]
    assert places == sorted(places)
    assert "4/5" in stream.getvalue()[places[-1] :]
    assert stream.getvalue().rpartition("\r")[0].rpartition("\r")[2].strip() == ""


@pytest.mark.parametrize(("phases", "stream"), [(START_UP, io.StringIO()), ((), Terminal())])
def test_a_log_and_a_rank_without_phases_are_silent(phases: tuple[Phase, ...], stream: io.StringIO) -> None:
    bar = PhaseBar(phases, stream)
    bar.begin(Phase.BUILD)
    bar.close()
    assert stream.getvalue() == ""


def test_a_phase_that_is_not_of_the_start_up_takes_the_bar_away() -> None:
    stream = Terminal()
    bar = PhaseBar(START_UP, stream)
    bar.begin(Phase.CONNECT)
    bar.begin(Phase.STEP)
    assert stream.getvalue().rpartition("\r")[0].rpartition("\r")[2].strip() == ""


def test_seconds_of_phases_add_up_and_what_is_within_a_phase_is_not_of_it(monkeypatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0, 15.0])
    monkeypatch.setattr("framework.monitor.progress.time.monotonic", lambda: next(clock))
    heard: list[Phase] = []
    phases = Phases(on_begin=heard.append)
    phases.begin(Phase.STEP, 1)
    with phases.within(Phase.DATA):
        assert (phases.current.phase, phases.current.step) == (Phase.DATA, 1)
    phases.begin(Phase.SAVE)
    assert {phase: s for phase, s in phases.seconds.items() if s} == {Phase.LIBRARIES: 1, Phase.STEP: 10, Phase.DATA: 4}
    assert (phases.current.phase, phases.current.step, phases.current.since_s) == (Phase.SAVE, 1, 15.0)
    assert heard == [Phase.LIBRARIES, Phase.STEP, Phase.DATA, Phase.STEP, Phase.SAVE]
