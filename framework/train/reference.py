"""Log-probabilities of a data set's answers under the reference that a loss compares with (`loss.reference`: a folder of weights,
or a run): one pass over all rows, in the layout that trains, before the model that is trained has memory.

    STORE/reference-KEY    a line of JSON: of which reference and which tokens; then fp64 [documents] of train, of validation

It is kept beside the tokens under a key of the reference's weights and of all else that the numbers depend on, so that every run
with this reference finds it, in any layout. A document that no row holds has no number. The frozen model under an adapter (base)
is not asked here but in each step (`train/step.py`), by the same forward: in one layout both give the same bits.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from transformers import PretrainedConfig

from framework.checkpoint.index import encode_manifest, read_manifest
from framework.comm.collectives import all_reduce
from framework.comm.connect import Mesh
from framework.comm.objects import broadcast_object
from framework.data.pack import Microbatch
from framework.data.prepared import Prepared, PreparedSource
from framework.data.store import SPLITS, Split
from framework.errors import DataError
from framework.files import write_atomically
from framework.launch.resume import Origin, find_origin, is_folder_of_weights
from framework.model.adapters import is_adapter
from framework.model.hub import find_folder
from framework.model.load import load_config
from framework.model.safetensors_files import fingerprint_files
from framework.parallel.pipeline.pipeline import FORWARDS_AT_ONCE
from framework.plan.plan import Plan, make_plan
from framework.recipe.method_schema import NONE
from framework.recipe.schema import Adapter, Offload, Optim, Recipe
from framework.train.build import build
from framework.train.state import begin_from
from framework.train.step import score, to_device

# One pass over the rows of a split, as this rank reads them.
ReadRows = Callable[[Split], Iterator[Microbatch]]
Scores = dict[tuple[int, Split], np.ndarray]
# Words of a config that change no number.
NO_VALUES = ("_name_or_path", "transformers_version")


def add_reference(plan: Plan, prepared: Prepared, mesh: Mesh, read_rows: ReadRows, begin: Callable[[], None]) -> None:
    """Give the streams of all sources the log-probabilities under the reference, computed unless they are there. Collective.

    begin: called before each part of the pass, so that none is taken for hung.
    """
    reference = plan.recipe.loss.reference
    if reference is None or reference == "base":
        return
    world = mesh.axis("world")
    origin, words = broadcast_object(partial(identify, plan, reference), world)
    files = [source.folder / f"reference-{words['key']}" for source in prepared.sources]
    if not broadcast_object(lambda: all(path.exists() for path in files), world):
        scores = _score_all(plan, prepared, mesh, origin, read_rows, begin)

        def write() -> None:
            for number, (path, source) in enumerate(zip(files, prepared.sources, strict=True)):
                _write(path, source, words, [scores[number, split] for split in SPLITS])

        broadcast_object(write, world)
    # Other nodes may not see the files.
    found = broadcast_object(lambda: [_read(*each, words) for each in zip(files, prepared.sources, strict=True)], world)
    for source, values in zip(prepared.sources, found, strict=True):
        for split in SPLITS:
            source.streams[split].reference = values[split]


def identify(plan: Plan, reference: str) -> tuple[Origin | None, dict[str, Any]]:
    """The checkpoint that is the reference, None for a folder of weights; and all that its numbers depend on, with its key."""
    recipe, origin = plan.recipe, None if is_folder_of_weights(reference) else find_origin(reference)
    if origin is None:
        weights = fingerprint_files(find_folder(reference))
    else:
        assert origin.checkpoint is not None, "settle_reference refuses step 0"
        weights = xxhash.xxh3_128_hexdigest(encode_manifest(read_manifest(origin.checkpoint)).encode())
    # Whole: a folder's config.json may change beside the same weights.
    config = json.loads(_find_config(plan, origin).to_json_string())
    words = {"weights": weights, "precision": recipe.precision.compute, "context": recipe.batch.context}
    words |= {"config": {name: each for name, each in config.items() if name not in NO_VALUES}}
    words |= {"overlong": recipe.data.overlong}
    return origin, words | {"key": xxhash.xxh3_64_hexdigest(json.dumps(words, sort_keys=True).encode())}


def _find_config(plan: Plan, origin: Origin | None) -> PretrainedConfig:
    """The reference's config: of a run's checkpoint that of the model which is trained, else its folder's."""
    return plan.config if origin is not None else load_config(freeze(plan, is_run=False).model, find_folder)


def _score_all(
    plan: Plan, prepared: Prepared, mesh: Mesh, origin: Origin | None, read_rows: ReadRows, begin: Callable[[], None]
) -> Scores:
    """The log-probabilities of all documents by source and split, fp64 [documents], on all ranks."""
    recipe = freeze(plan, origin is not None)
    frozen = make_plan(recipe, _find_config(plan, origin))
    # One of the ranks that compute the same counts it.
    is_counted = all(mesh.axis(name).rank == 0 for name in ("tp", "cp"))
    totals: Scores = {}
    with closing(build(frozen, mesh, resumes=origin is not None)) as run:
        if origin is not None:
            begin_from(run, "reference", origin, prepared.fingerprint, plan.recipe)
        for split in SPLITS:
            # Sums and how often each document was met, which is once or never.
            found = [torch.zeros(2, each.streams[split].num_documents) for each in prepared.sources]
            found = [each.to(mesh.device, torch.float64) for each in found]
            rows = read_rows(split)
            while part := list(islice(rows, FORWARDS_AT_ONCE)):
                begin()
                scores = score(run, to_device(run, part))
                for microbatch, log_p in zip(part, scores, strict=bool(scores)):
                    assert microbatch.pairs is not None, "rows of pairs"
                    is_there = microbatch.pairs.kinds != NONE
                    numbers = microbatch.pairs.numbers[is_there].to(mesh.device)
                    values = log_p[is_there.to(mesh.device)].to(torch.float64) * is_counted
                    found[microbatch.source][:, numbers] += torch.stack([values, torch.full_like(values, is_counted)])
            for number, each in enumerate(found):
                all_reduce(each, mesh.axis("world"), label="log-probabilities of the reference")
                sums, counts = each.cpu().numpy()
                totals[number, split] = np.where(counts > 0, sums, np.nan)
    return totals


def freeze(plan: Plan, is_run: bool) -> Recipe:
    """The recipe of the reference, in the layout of the run: all is frozen but the smallest parameter, for a run has one that is
    trained. is_run: its weights are a checkpoint's. No optimizer updates it, and what the recipe's asks of trained parameters is
    not asked of frozen ones."""
    recipe = plan.recipe
    named = plan.whole.named_parameters()
    sizes = {name: each.numel() for name, each in named if each.requires_grad and not is_adapter(name)}
    smallest = min(sizes, key=lambda name: (sizes[name], name))
    weights = recipe.model.weights if is_run else recipe.loss.reference
    revision = recipe.model.revision if is_run else None
    model = replace(
        recipe.model, weights=weights, revision=revision, freeze=[rf"^(?!{re.escape(smallest)}$)"], router_bias_rate=0.0
    )
    offload = Offload(parameters=recipe.memory.offload.parameters)
    train, memory = replace(recipe.train, ema=None), replace(recipe.memory, offload=offload)
    return replace(recipe, model=model, adapter=Adapter(), optim=Optim(), train=train, memory=memory)


def _write(path: Path, source: PreparedSource, words: Mapping[str, Any], values: list[np.ndarray]) -> None:
    data = b"".join(each.tobytes() for each in values)
    head = {"reference": words, "tokens": source.meta.fingerprint, "hash": xxhash.xxh3_128_hexdigest(data)}
    with write_atomically(path) as file:
        file.write(json.dumps(head).encode() + b"\n" + data)


def _read(path: Path, source: PreparedSource, words: Mapping[str, Any]) -> dict[Split, np.ndarray]:
    """The values by split. DataError where they are of another reference or of other tokens, or damaged."""
    line, _, data = path.read_bytes().partition(b"\n")
    sizes = [source.streams[split].num_documents for split in SPLITS]
    try:
        head = json.loads(line)
        wanted = {"reference": dict(words), "tokens": source.meta.fingerprint, "hash": xxhash.xxh3_128_hexdigest(data)}
        wrong = [name for name, each in wanted.items() if head.get(name) != each]
    except (ValueError, AttributeError):
        wrong = ["content"]
    if wrong or len(data) != 8 * sum(sizes):
        raise DataError(
            f"{path} has no log-probabilities of loss.reference for these tokens: its {' and '.join(wrong) or 'size'} differs."
            " Delete it; the next start computes it anew"
        )
    values = np.split(np.frombuffer(data), sizes[:1])
    return dict(zip(SPLITS, values, strict=True))
