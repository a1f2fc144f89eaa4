"""Scores of lm-evaluation-harness for five small tasks of a local folder, which tests/data/lm_eval.json keeps.

A model whose weights are a formula, tokenizers that are trained on a few words, and task files made from a seed: equal on every
machine. The figures were made by

    python -m venv /tmp/lmeval && /tmp/lmeval/bin/pip install lm-eval==0.4.13    # beside this project's own packages
    PYTHONPATH=. /tmp/lmeval/bin/python -m tests.lm_eval_figures

with HFLM in fp64, max_length the context of the tests. Its eager casts to fp32 are kept in fp64, as `meshwright verify` does.
"""

import json
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from framework.data.tokenize import train_bpe
from framework.verify.evidence import keep_double
from tests.families import Family, build_config, family
from tests.tiny_run import WORDS

FIGURES = Path(__file__).parent / "data" / "lm_eval.json"
CONTEXT = 24
VOCABULARY = 320


def write_model(folder: Path, has_bos: bool = False, kind: Family | None = None, **changes: Any) -> None:
    """Write a Hugging Face folder of a small model with formulas as weights, and its tokenizer."""
    # Tied and with small layers, so that it often repeats a word: some continuations are what it says greedily.
    changes = {"vocab_size": VOCABULARY, "max_position_embeddings": 256, "tie_word_embeddings": True} | changes
    config = build_config(kind or family("llama"), **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        index = torch.arange(parameter.numel(), dtype=torch.float64)
        values = (torch.sin(index * 12.9898 + number) * 43758.5453 % 1 - 0.5) * (1.0 if "embed" in name else 0.2)
        with torch.no_grad():
            parameter.copy_((values + (parameter.dim() == 1)).view_as(parameter))
    model.save_pretrained(folder)
    draw = random.Random(7)
    tokenizer = train_bpe((" ".join(draw.choices(WORDS, k=30)) for _ in range(50)), VOCABULARY)
    if has_bos:
        tokenizer.add_special_tokens({"bos_token": "<s>"})
        bos = tokenizer.bos_token_id
        assert bos < VOCABULARY, f"{bos} has no embedding"
        processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)])
        tokenizer.backend_tokenizer.post_processor = processor
    tokenizer.save_pretrained(folder)


def write_tasks(folder: Path) -> None:
    """Write five task files: choices, contexts, continuations, an empty context with several answers, and prose."""
    draw = random.Random(1)
    folder.mkdir()

    def say(count: int) -> str:
        return " ".join(draw.choices([*WORDS, "Äpfel", "2.5", "unlayout"], k=count))

    def write(name: str, records: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")

    write(
        "choices",
        [
            {
                # Some are longer than a row, some end with a space.
                "context": say(draw.choice([1, 2, 5, 9, 30])) + draw.choice(["", "", "  "]),
                "choices": [f" {say(draw.randint(1, 4))}" for _ in range(4)],
                "answer": draw.randrange(4),
            }
            for _ in range(31)
        ],
    )
    write(
        "contexts",
        [
            {
                "contexts": [f"{say(3)} {each}" for each in (say(1), say(2))],
                "continuation": f" {say(3)}.",
                "answer": draw.randrange(2),
            }
            for _ in range(13)
        ],
    )
    write("empty", [{"context": "", "choices": [say(2), say(1), say(3)], "answer": [0, 2]} for _ in range(9)])
    beginnings = [say(draw.randint(2, 9)) for _ in range(29)]
    endings = [draw.choice([say(1), each.rpartition(" ")[2]]) for each in beginnings]
    pairs = zip(beginnings, endings, strict=True)
    write("last_word", [{"context": context, "continuation": f" {ending}"} for context, ending in pairs])
    write("prose", [{"text": f"{say(count)}\n\n{say(3)}"} for count in (1, 40, 99)])


TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices|map('trim')|list}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "contexts": {
        "output_type": "multiple_choice",
        "doc_to_text": "answer",
        "doc_to_choice": "contexts",
        "doc_to_target": "continuation",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "empty": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "last_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{continuation}}",
        "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
    },
    "prose": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": each} for each in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    },
}


def measure(folder: Path, tasks: Path) -> dict[str, Any]:
    """Scores by task, and the log-probabilities of its requests in order, by lm-evaluation-harness."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(folder), dtype="float64", max_length=CONTEXT, batch_size=1, device="cpu")
    asked = [
        {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tasks / f"{name}.jsonl")}},
            "test_split": "test",
            **words,
        }
        for name, words in TASKS.items()
    ]
    with keep_double(torch.float64):
        found = simple_evaluate(model=model, tasks=asked, num_fewshot=0, bootstrap_iters=0, log_samples=True)
    scores = {
        f"{name}/{metric.removesuffix(',none')}": value
        for name, values in found["results"].items()
        for metric, value in values.items()
        if metric.endswith(",none") and "stderr" not in metric
    }
    log_p = {}
    for name, samples in found["samples"].items():
        samples = sorted(samples, key=lambda each: each["doc_id"])
        if name != "prose":
            log_p[name] = [float(one[0]) for each in samples for one in each["filtered_resps"]]
    return {"scores": scores, "log_p": log_p}


def main() -> None:
    """Write the figures."""
    import lm_eval
    import transformers

    figures: dict[str, Any] = {"lm_eval": lm_eval.__version__, "transformers": transformers.__version__}
    for name, has_bos in (("plain", False), ("bos", True)):
        with TemporaryDirectory() as root:
            folder, tasks = Path(root, "model"), Path(root, "tasks")
            write_model(folder, has_bos)
            write_tasks(tasks)
            figures[name] = measure(folder, tasks)
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: figures[name]["scores"] for name in ("plain", "bos")}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
