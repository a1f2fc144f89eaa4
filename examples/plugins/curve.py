"""A tracker: RUN/NAME.curve has step and loss of every report. A run with this plugin has it; there is no key.

It lives in a process of its own, so it may be slow, wait for a server, or fail: training goes on.
"""

from framework.extend import tracker
from framework.track.report import Tracker


@tracker("curve")
class Curve(Tracker):
    """One file for each curve of the run."""

    def open(self, info, run_dir, name):
        """Begin; the newest step that is there already, 0 to get all of metrics.jsonl."""
        self.file = (run_dir / f"{name}.curve").open("w", encoding="utf-8")
        return 0

    def log(self, step, values):
        """The values of a step, by the names that charts have."""
        print(step, values["loss"], file=self.file, flush=True)
