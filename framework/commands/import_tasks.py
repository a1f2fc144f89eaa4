"""Tasks of lm-evaluation-harness as files of ours (`meshwright evaluate --import`): the only place that imports it."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from framework.errors import EXIT_DONE, DataError, ModelError
from framework.files import write_atomically

# Seed with which lm-eval's `simple_evaluate` draws few-shot examples.
FEWSHOT_SEED = 1234


def import_tasks(names: Sequence[str], folder: Path) -> int:
    """Write FOLDER/TASK.jsonl for each task, or each of a group. Data sets come from the hub or its cache."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ModelError(
            f"tasks of lm-evaluation-harness need it ({error}): pip install 'meshwright[eval]'. Local task files do not"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    for name, task in TaskManager().load(list(names))["tasks"].items():
        task.set_fewshot_seed(FEWSHOT_SEED)
        task.build_all_requests()
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in convert_task(name, task)]
        path = folder / f"{name}.jsonl"
        with write_atomically(path) as file:
            file.write("".join(lines).encode())
        print(f"written  {path}, {len(lines):,} records")
        if callable(task.config.process_results):
            print(f"caution  {name} has scores by code of its own; Meshwright's are by docs/evaluation.md")
    return EXIT_DONE


def convert_task(name: str, task: Any) -> Iterator[dict[str, Any]]:
    """The records of a task whose requests are built. DataError for tasks that generate text."""
    if task.OUTPUT_TYPE not in ("multiple_choice", "loglikelihood", "loglikelihood_rolling"):
        raise DataError(f"{name} is a task of {task.OUTPUT_TYPE}: only log-likelihoods are scored during training")
    for _, group in groupby(task.instances, lambda each: each.doc_id):
        requests = list(group)
        if task.OUTPUT_TYPE == "loglikelihood_rolling":
            yield {"text": requests[0].args[0]}
        elif task.OUTPUT_TYPE == "loglikelihood":
            yield dict(zip(("context", "continuation"), requests[0].args, strict=True))
        else:
            yield _convert_choices(task, requests)


def _convert_choices(task: Any, requests: Sequence[Any]) -> dict[str, Any]:
    doc = requests[0].doc
    choices = task.doc_to_choice(doc)
    # For mutual information each choice follows again, without its context.
    contexts, continuations = zip(*(each.args for each in requests[: len(choices)]), strict=True)
    answer = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    answer = choices.index(answer) if isinstance(answer, str) else answer
    known = {"answer": answer, "sizes": [len(each) for each in choices]}
    if task.multiple_input:
        return {"contexts": list(contexts), "continuation": continuations[0], **known}
    return {"context": contexts[0], "choices": list(continuations), **known}
