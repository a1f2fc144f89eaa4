"""End-to-end check of the commands as they are typed: what must be seen, and the exit code.

Each option of each command is in one of them.

    python scripts/try_as_user.py            # those that need no training: a minute, CI runs them
    python scripts/try_as_user.py --all      # and those that train: three minutes more
    python scripts/try_as_user.py --only 13  # one, with its whole output

Each command and its output are printed, to be read by somebody; what is missing in it, and any traceback, is named at the end.
They run in a folder of their own, offline, with the `meshwright` of this Python.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

EXIT_DONE, EXIT_RESUME, EXIT_USER = 0, 85, 86
SHOWN_LINES = 14


@dataclass(frozen=True)
class Action:
    """Words that are typed behind `meshwright`; the exit code; patterns that the output must have, in any order.

    trains: it trains or takes long, and is left to --all. leaves_no_run: no file appears in runs/. lines: the most that it may
    print. interrupted: Ctrl-C behind its third step.
    """

    typed: str
    code: int
    seen: tuple[str, ...]
    trains: bool = False
    leaves_no_run: bool = False
    lines: int | None = None
    interrupted: bool = False


def refused(typed: str, *seen: str, trains: bool = False) -> Action:
    """A mistake: exit code 86, and no run is begun."""
    return Action(typed, EXIT_USER, seen, trains=trains, leaves_no_run=True)


def done(typed: str, *seen: str, trains: bool = False, lines: int | None = None) -> Action:
    return Action(typed, EXIT_DONE, seen, trains=trains, lines=lines)


QUICK = "experiment=quickstart"
SMALL = f"{QUICK} train.steps=20 train.validate_every_steps=10 checkpoint.every_steps=10 optim.schedule.warmup_steps=5"
LONG = f"{SMALL} train.steps=2000"
TEXTS = "data=files data.sources.files.path=texts"
FILES = "--html page.html --overwrite"
ACTIONS = (
    refused("train", "nothing says what to train", "experiment=quickstart", "pretrain_llama3_2_1b"),
    done("--version", r"meshwright \d+\.\d+", "torch", "transformers"),
    done("train --help", "usage: meshwright train", "--help-recipe", lines=40),
    refused("check quickstart", "experiment=quickstart"),
    refused(f"check {QUICK} zero=3", "zero=stage_3"),
    done("check --from trainer.json launch.ranks=1", r"lr: 0\.001", "No counterpart", "lora_r"),
    refused(f"check {QUICK} train.steps:500", "train.steps=500"),
    refused("check recipes/experiment/quickstart.yaml", "experiment=quickstart"),
    refused(f"check {QUICK} trian.steps=5", "did you mean train.steps"),
    refused("train data=files data.sources.files.path=chat.jsonl model=tiny_llama", "data.sources.files.field=content"),
    refused(f"check {QUICK} cutoff_len=2048 base_model=x val_set_size=0.1", "batch.context", "model.weights", "data.validation"),
    refused(f"check {QUICK} flash_attention=true lora_r=8 load_in_4bit=true neftune_noise_alpha=5",
            "adapter.base=nf4", "not in this version"),
    refused(f"check {QUICK} model.family=lama", "did you mean model.family=llama"),
    refused(f"check --model {QUICK} model.config.hiden_size=64", "hidden_size"),
    refused(f"check --model {QUICK} model.config.num_key_value_heads=3", "num_key_value_heads=1 or 2 or 4"),
    refused(f"check --model {QUICK} parallel.tp=3 launch.ranks=3", r"use parallel\.tp in"),
    refused(f"submit --dry-run {QUICK} launch=slurm launch.ranks=4 parallel.pp=4", "the model has 2 layers"),
    refused(f"check --model {QUICK} batch.context=99999", "2,048 positions", r"batch\.context=2048"),
    refused("train run.id=nosuch", "there is no run runs/nosuch"),
    refused("status nosuch", "nosuch"),
    refused("inspect nosuch", "there is no folder runs/nosuch"),
    refused("evaluate first second --tasks sums.jsonl", "first is named before second"),
    refused("train ~model model.weights=/no/such/folder data=files data.sources.files.path=texts", "/no/such/folder"),
    refused("train ~model model.weights=weights data=files data.sources.files.path=texts", "no tokenizer", "model.tokenizer"),
    refused("train ~model model.weights=org/name data=files data.sources.files.path=texts", "hf download org/name"),
    refused(f"train {QUICK} data.root=/proc/nowhere", "data.root", "/proc/nowhere"),
    done("submit --dry-run experiment=pretrain_llama3_2_1b launch=slurm launch.nodes=2", "--nodes=2", "--ntasks-per-node"),
    done("plan model=llama3_2_1b parallel.pp=4 launch.ranks=4 pipeline.schedule=zbv launch.device=cuda cluster=h100_ib --ranks",
         "bytes of a rank", "zbv"),
    done("check --keys clip", "optim.clip_norm"),
    done(f"check {QUICK} data.sources.files.path=texts", "stdlib 50%, files 50%"),
    done("check --recipes own experiment=mine", "steps: 77"),
    done("check --recipes own --help-recipe", "mine", "llama3_2_1b"),
    done(f"check --sources {QUICK}", r"warmup_steps = 20 +recipes/experiment/quickstart.yaml:\d+"),
    done(f"plan {QUICK} parallel.pp=2 --ranks --layouts --schedule --options {FILES} --schedule-to s.csv",
         "bytes of a rank", "all schedules", "memory", "the schedule to s.csv", "wrote page.html", trains=True),
    refused(f"plan {QUICK} --html own/experiment/mine.yaml", "mine.yaml"),
    done(f"search {QUICK} --by memory --best 2 --rejections --free zero --keep memory --write best.yaml {FILES}",
         "by bytes of the fullest rank", "wrote best.yaml", "wrote page.html", trains=True),
    done(f"search {QUICK} --json --best 1", r'^\{"'),
    done(f"prepare {TEXTS} data.bpe_vocab=300 data.validation=0 train.validate_every_steps=null --workers 1",
         "tokens", r"of \d+ cores"),
    done("prepare experiment=quickstart_chat --show 3", "tokens are trained", r"assistant\n\[\[.*<\|im_end\|>\]\]"),
    done(f"submit -m --dry-run {QUICK} launch=slurm launch.nodes=1 launch.ranks_per_node=2 train.seed=1,2", "--array=0-1"),
    done("inject --list", "kill"),
    refused("verify --strict --ranks 3 --model-config c.json experiment=quickstart", "--model-config, --ranks would change it"),
    refused(f"verify {QUICK} --device cuda", "torch sees no GPU here"),
    refused("status --nosuch", "no option --nosuch"),
    refused("goodput first", "meshwright status RUN"),
    done(f"verify {QUICK} --dtype fp64 --steps 2 --ranks 2", "fp64", "equal: this layout", trains=True),
    done(f"verify --strict {QUICK} train.steps=1 optim.schedule.warmup_steps=0 --steps 1", "equal: this layout", trains=True),
    done(f"verify {QUICK} --end-to-end", "equal", trains=True),
    done(f"search {QUICK} --try 1 --try-steps 3", "trying", trains=True),
    done("doctor --measure measured.yaml --overwrite", "measured.yaml", trains=True),
    done(f"train -m {SMALL} run.name=both train.seed=1,2", r"\[2/2\]", trains=True),
    done(f"verify {QUICK} zero.stage=3", "equal: this layout trains as one process does", trains=True),
    done(f"train {SMALL} run.id=first", "validation loss", "meshwright generate", trains=True),
    done("generate first --prompt 'def f(' --max-new-tokens 5 --temperature 0 --seed 3", "def f", trains=True, lines=8),
    done("train experiment=quickstart_chat run.id=chat train.steps=40", "what the model answers", trains=True),
    done("generate chat --chat --system Short. --prompt 'What does len do?'", r"What does len do\?", trains=True, lines=20),
    done("inspect first", "every hash fits", trains=True),
    refused("save first", "does not run", trains=True),
    refused("stop first", "does not run", trains=True),
    refused("export first --best --to best", "kept no best checkpoint", trains=True),
    done("export first --step 10 --to ten", "exported step 10 of runs/first to ten", trains=True),
    refused("export first --step 7 --to seven", "those of steps: 20, 10", trains=True),
    Action(f"train {LONG} run.id=second", EXIT_RESUME, ("saved at step", "train run.id=second"), True, interrupted=True),
    done("status second", "not running", r"saved +step", "meshwright train run.id=second", trains=True),
    done("diff first second", "train.steps", "loss", trains=True),
    done("export first --to out", "exported", trains=True),
    done("export first --dtype bf16 --to narrow", "exported", trains=True),
    done("export first --text --to alone", "exported", trains=True),
    done("evaluate first --tasks sums.jsonl --limit 2 --json scores.json", "sums", "acc", trains=True),
    done("evaluate first --step 10 --tasks sums.jsonl", "acc", trains=True),
    refused("evaluate first --best --tasks sums.jsonl", "kept no best checkpoint", trains=True),
    refused("evaluate nosuch --tasks sums.jsonl", "nosuch"),
    refused("evaluate --import arc_easy --to tasks", r"meshwright\[eval\]"),
    refused(f"plan {QUICK} --loads first", "first", trains=True),
    done("prune first --keep 1", "would be free", trains=True),
    done("prune --yes", "are free", trains=True),
    refused("export first --merged --to merged", "has no adapter to merge", trains=True),
    refused("export first --average --to average", "train.ema", trains=True),
    refused(f"verify {QUICK} --coordinates widths.png --widths 2", "model.mup_base"),
)  # fmt: skip


def make_place(place: Path) -> None:
    """Texts, in a folder and in a field of another name, and a folder of weights without a tokenizer."""
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    (place / "chat.jsonl").write_text('{"content": "a text in another field"}\n' * 50)
    (place / "sums.jsonl").write_text('{"context": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}\n' * 3)
    (place / "trainer.json").write_text('{"learning_rate": 0.001, "max_steps": 9, "lora_r": 8}')
    (place / "texts").mkdir()
    for number in range(4):
        (place / "texts" / f"{number}.txt").write_text(f"text {number} " * 200)
    (place / "own" / "experiment").mkdir(parents=True)
    (place / "own" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n# A recipe of mine\ndefaults: [quickstart]\ntrain: {steps: 77}\n"
    )
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(place / "weights")


def list_files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def interrupt(process: subprocess.Popen[str], metrics: Path) -> None:
    """Ctrl-C once three steps are reported. A process that has ended by itself, or reports none, is left to `wait`."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text().count("\n") >= 3:
            process.send_signal(signal.SIGINT)
            return
        time.sleep(0.05)


def wait(process: subprocess.Popen[str], seconds: float) -> str:
    """The output until the process ends; one that does not is killed."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def run(action: Action, place: Path) -> tuple[str, list[str]]:
    """The output, and what is wrong with it."""
    before = list_files(place / "runs")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "80", "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(
        f"exec {sys.executable} -m framework {action.typed}", shell=True, cwd=place, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if action.interrupted:
        interrupt(process, place / "runs" / action.typed.rpartition("=")[2] / "metrics.jsonl")
    output = wait(process, 300 if action.trains else 60)
    wrong = [f"no {pattern!r}" for pattern in action.seen if not re.search(pattern, output)]
    checks: tuple[tuple[bool, Callable[[], str]], ...] = (
        (process.returncode != action.code, lambda: f"exit code {process.returncode}, not {action.code}"),
        ("Traceback" in output, lambda: "a traceback"),
        (action.lines is not None and output.count("\n") > action.lines, lambda: f"{output.count(chr(10))} lines"),
        (action.leaves_no_run and list_files(place / "runs") != before, lambda: "it began a run"),
    )
    return output, wrong + [say() for is_wrong, say in checks if is_wrong]


def show(output: str, is_whole: bool) -> str:
    lines = output.replace("\r", "\n").rstrip().splitlines()
    cut = 0 if is_whole else max(0, len(lines) - SHOWN_LINES)
    return "\n".join([*([f"    ... {cut} lines"] if cut else []), *(f"    {line}" for line in lines[cut:])])


def try_all(actions: Iterator[tuple[int, Action]], is_whole: bool) -> int:
    """The number of actions in which something is wrong."""
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="meshwright-user-") as folder:
        make_place(Path(folder))
        for number, action in actions:
            output, wrong = run(action, Path(folder))
            print(f"{number}. $ meshwright {action.typed}\n{show(output, is_whole)}\n", flush=True)
            if wrong:
                found[f"{number}. {action.typed}"] = wrong
    for name, wrong in found.items():
        print(f"WRONG {name}: {'; '.join(wrong)}")
    return len(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also those that train")
    parser.add_argument("--only", type=int, metavar="N", help="the N-th alone, with its whole output")
    options = parser.parse_args()
    chosen = (
        (number, action)
        for number, action in enumerate(ACTIONS, 1)
        if (options.only == number if options.only else options.all or not action.trains)
    )
    return int(try_all(chosen, is_whole=options.only is not None) > 0)


if __name__ == "__main__":
    sys.exit(main())
