"""The composed tree without interpolations."""

import re
from collections.abc import Mapping
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from framework.recipe.convert import MANDATORY
from framework.recipe.environment import keep_references
from framework.recipe.keys import join
from framework.recipe.origins import origin_of
from framework.recipe.problem import Problem

# Resolvers whose value is another one at every composition, so that a run could not be composed again.
_VOLATILE = re.compile(r"\$\{\s*(now|hydra)\s*[:.]")


def resolve(tree: DictConfig, origins: Mapping[str, str]) -> tuple[dict[str, Any], list[Problem]]:
    """Plain dicts and lists with all interpolations resolved, but for launch.environment's references to the environment; a
    key whose interpolation fails is left out and reported."""
    problems: list[Problem] = []
    written = cast(dict[str, Any], OmegaConf.to_container(tree, resolve=False))
    return _resolve_group(tree, written, "", origins, problems), problems


def _resolve_group(
    tree: DictConfig, written: Mapping[str, Any], path: str, origins: Mapping[str, str], problems: list[Problem]
) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in written.items():
        where = join(path, name)
        if isinstance(value, Mapping):
            plain[name] = _resolve_group(tree[name], value, where, origins, problems)
            continue
        try:
            if path == "launch.environment" and isinstance(value, str):
                tree[name] = value = keep_references(value)
            plain[name] = _resolve_value(tree, name, value)
        except (OmegaConfBaseException, ValueError) as error:
            problems.append(Problem(where, value, str(error).splitlines()[0], "", origin_of(origins, where)))
    return plain


def _resolve_value(tree: DictConfig, name: str, written: Any) -> Any:
    if written == MANDATORY:  # reading it would raise; the conversion says what it is for
        return written
    if _VOLATILE.search(str(written)):
        raise OmegaConfBaseException("its value would differ at every composition; give it outright")
    if "${" not in str(written):
        return written
    value = tree[name]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
