"""Random and Bayesian sweeps: Hydra's optuna sweeper proposes values, `meshwright train` trains each in turn, and the last
validation loss judges them. Needs `pip install 'meshwright[sweep]'`; docs/recipes.md has a command.

Overrides are those of `meshwright train` with a + in front, ranges among them: Hydra knows keys of this app's own config alone,
which is empty, and `train` composes recipes. Each run is an ordinary one, `optuna-DATE-TIME-N`.
"""

import subprocess
import sys
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig

from framework.errors import EXIT_DONE
from framework.recipe.schema import Run
from framework.start import python_words
from framework.track.jsonl import METRICS_FILE, read_records


@hydra.main(version_base=None, config_path=None)
def train(_: Any) -> float:
    """Train one run of the sweep. Returns its last validation loss; infinity where it failed or has none."""
    config = HydraConfig.get()
    run_id = "-".join(["optuna", *Path(config.sweep.dir).parts[-2:], str(config.job.num)])
    words = [word.removeprefix("+") for word in config.overrides.task]
    command = [sys.executable, *python_words("framework", "train", *words, f"run.id={run_id}")]
    if subprocess.run(command, check=False).returncode != EXIT_DONE:
        return inf
    records = read_records(Path(Run().root) / run_id / METRICS_FILE)
    losses = [each["validation_loss"] for each in records if each["validation_loss"] is not None]
    return float(losses[-1]) if losses else inf


if __name__ == "__main__":
    if find_spec("optuna") is None:
        sys.exit("the package optuna is not installed: pip install 'meshwright[sweep]'")
    train()
