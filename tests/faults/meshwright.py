"""`meshwright` in processes of its own, as users have it."""

import json
import subprocess
import sys
from pathlib import Path


def run_meshwright(*words):
    command = [sys.executable, "-m", "framework", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr


def losses(run):
    """Of each step of the run in folder `run`."""
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}
