"""A bar for what comes before the first step: libraries take seconds to load, and a silent terminal looks like a hang."""

import sys
from collections.abc import Sequence
from typing import TextIO

from tqdm import tqdm

from framework.train.phases import Phase

START_UP = (Phase.LIBRARIES, Phase.CONNECT, Phase.OPEN_DATA, Phase.BUILD, Phase.RESTORE)


class PhaseBar:
    """Shows which of `phases` is under way on `stream`, standard error by default; any other phase takes the bar away.

    Silent without phases, as on all ranks but one, and where the stream is no terminal: a log has no use for it.
    """

    def __init__(self, phases: Sequence[Phase] = (), stream: TextIO | None = None) -> None:
        stream = stream or sys.stderr
        self._phases = tuple(phases)
        self._bar = tqdm(
            total=len(phases),
            leave=False,
            file=stream,
            bar_format="{desc:<16} |{bar:20}| {n_fmt}/{total_fmt} [{elapsed}]",
            disable=not (phases and stream.isatty()),
        )

    def begin(self, phase: Phase) -> None:
        """The phases before `phase` are over."""
        if phase not in self._phases:
            self.close()
        elif not self._bar.disable:
            self._bar.set_description_str(phase, refresh=False)
            self._bar.n = self._phases.index(phase)
            self._bar.refresh()

    def close(self) -> None:
        """Takes the bar off the terminal. May be called twice."""
        self._bar.close()
