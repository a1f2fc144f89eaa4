"""Rules of context parallelism: degrees that multiply to cp, heads for Ulysses, tokens for every rank."""

from collections.abc import Iterator
from itertools import count, islice

from framework.recipe.derive import context_degrees, count_context_parts
from framework.recipe.problem import Problem
from framework.recipe.schema import Parallel, Recipe


def find_degree_problems(recipe: Recipe) -> Iterator[Problem]:
    """The Ulysses and the ring degree multiply to cp; a method needs ranks that divide sequences."""
    parallel = recipe.parallel
    key, found, cp = "parallel.context", parallel.context, parallel.cp
    if isinstance(found, list):
        pairs = " or ".join(f"[{u},{cp // u}]" for u in _divisors(cp))
        if len(found) != 2:
            message = "a list is of two degrees, the Ulysses and the ring degree"
            yield Problem(key, found, message, f"{key}={pairs}")
            return
        if found[0] * found[1] != cp:
            message = f"{found[0]} * {found[1]} = {found[0] * found[1]} ranks divide a sequence, but parallel.cp={cp}"
            yield Problem(key, found, message, f"{key}={pairs}; or parallel.cp={found[0] * found[1]}")
    elif cp == 1 and found != Parallel().context:
        message = "with parallel.cp=1 every rank has whole sequences, so it would do nothing"
        yield Problem(key, found, message, f"{key}={Parallel().context}, the default; or parallel.cp=2 or more")


def find_head_problems(recipe: Recipe) -> Iterator[Problem]:
    """Ulysses gives each rank some of the heads, where the recipe says how many there are; a plan knows it for all models."""
    parallel, heads = recipe.parallel, recipe.model.config.get("num_attention_heads")
    if isinstance(heads, int) and heads % parallel.tp == 0:
        yield from find_uneven_heads(parallel, heads)


def find_uneven_heads(parallel: Parallel, heads: int) -> Iterator[Problem]:
    """The heads of a layer, divided over `tp`, do not divide over Ulysses' ranks."""
    ulysses, own = context_degrees(parallel)[0], heads // parallel.tp
    if own % ulysses == 0:
        return
    pairs = " or ".join(f"[{degree},{parallel.cp // degree}]" for degree in ulysses_degrees(parallel.cp, own))
    held = f"num_attention_heads={heads}" + (f" / parallel.tp={parallel.tp}" if parallel.tp > 1 else "")
    message = f"a Ulysses degree of {ulysses} does not divide the {own} heads of a rank ({held})"
    yield Problem("parallel.context", parallel.context, message, f"parallel.context={pairs}; or ring")


def ulysses_degrees(cp: int, heads: int) -> list[int]:
    """Those that divide cp ranks, and the heads of a rank of tp."""
    return [degree for degree in _divisors(cp) if heads % degree == 0]


def find_attention_problems(recipe: Recipe) -> Iterator[Problem]:
    """Attention across ranks is Meshwright's: an implementation of Hugging Face's would not be asked."""
    if recipe.parallel.cp > 1 and recipe.model.attention != "auto":
        message = f"with parallel.cp={recipe.parallel.cp} attention is computed by Meshwright, across ranks"
        yield Problem("model.attention", recipe.model.attention, message, "model.attention=auto")


def find_length_problems(recipe: Recipe) -> Iterator[Problem]:
    """Every rank has a token of every sequence. Other lengths that do not divide are padded (`unpadded_lengths`)."""
    context, (ulysses, ring) = recipe.batch.context, context_degrees(recipe.parallel)
    if has_tokens_everywhere(context, ulysses, ring):
        return
    parts = count_context_parts(ulysses, ring)
    longer = list(islice((n for n in count(context) if has_tokens_everywhere(n, ulysses, ring)), 2))
    message = f"cut into {parts} parts for parallel.cp={ulysses * ring}, it leaves a rank without a token"
    fix = f"batch.context={longer[0]} or {longer[1]}, or a multiple of {parts}"
    yield Problem("batch.context", context, message, f"{fix}; or a smaller parallel.cp")


def has_tokens_everywhere(context: int, ulysses: int, ring: int) -> bool:
    """Whether each rank's first part, of ceil(context / parts) tokens, begins before the end of the sequence."""
    part = -(-context // count_context_parts(ulysses, ring))
    return (ulysses * ring - 1) * part < context


def unpadded_lengths(context: int, ulysses: int, ring: int) -> tuple[int, ...]:
    """The lengths next to `context`, below and above, of which no rank's parts are padded; `context` alone where it is one."""
    parts = count_context_parts(ulysses, ring)
    below = context // parts * parts
    return (context,) if below == context else (below, below + parts)[below == 0 :]


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
