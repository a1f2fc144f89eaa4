"""The smallest run of the whole program: a corpus of eight words and a model of 10k parameters."""

from pathlib import Path

WORDS = ("mesh", "axis", "layout", "box", "dual", "unit", "schedule", "state")
RECIPE = (
    "track=none",
    "data=files",
    "data.sources.files.path=corpus",
    "data.bpe_vocab=300",
    "data.validation=0",
    "model.config={vocab_size: 320, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2,"
    " num_attention_heads: 2, num_key_value_heads: 1, tie_word_embeddings: true}",
    "precision=fp32",
    "train.validate_every_steps=null",
    "optim.schedule.warmup_steps=2",
    "batch.context=16",
    "checkpoint.every_steps=20",
    "launch.threads_per_rank=1",
)


def write_corpus(folder: Path) -> None:
    """The text that RECIPE reads, where `folder` is ./corpus."""
    folder.mkdir()
    for number in range(20):
        text = " ".join(WORDS[(number * index * index + index) % len(WORDS)] for index in range(1, 200))
        (folder / f"{number}.txt").write_text(text)
