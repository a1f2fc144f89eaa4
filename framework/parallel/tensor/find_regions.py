"""The regions of a model, and the role of each module inside, found before anything is changed.

A region is a child of a decoder layer that contains something to split (an attention, an mlp, a mixture of experts), or a
single linear layer that the decoder layer holds itself. It is left where its row layers sum over ranks; a mixture of experts
is left as a whole, because its router and its shared experts' gates multiply what is still each rank's part. Where experts are
whole (parallel.expert_tp=1) a mixture is no region: its shared experts are, each for itself, and the router stands outside.
In layers of BERT's form a region has two modules, of which the second, `output`, begins with the row layer and goes on outside.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate
from types import MappingProxyType

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.errors import ModelError
from framework.model.experts import count_all_experts, find_unknown_experts, holds_experts
from framework.model.units import find_layers, form_of_mixer
from framework.parallel.tensor.rules import (
    FAMILIES,
    HEAD_DIMS,
    HEAD_NORMS,
    HEAD_NUMBERS,
    MIXERS,
    PARAMETERS,
    ROLES,
    Role,
    parse_role,
)

ROUTERS = ("gate", "router", "shared_expert_gate")
# Styles of Hugging Face's own plans that say all that is needed.
HINTS = MappingProxyType({"colwise": Role("column"), "rowwise": Role("row")})
LINEARS = (nn.Linear, Conv1D, nn.Conv1d)
# An attribute of attentions, one of them at least.
HEAD_WORDS = (*HEAD_DIMS, *HEAD_NUMBERS)


@dataclass(frozen=True)
class RegionPlan:
    """`name`: the module whose input enters. `roles`: by name of the modules inside that have parameters of their own.
    `experts`: the stacked experts inside; `is_block`: left as a whole."""

    name: str
    roles: Mapping[str, Role]
    experts: tuple[str, ...]
    is_block: bool


@dataclass
class _Search:
    """The model, the tables by which roles are found, and the modules without one."""

    model: PreTrainedModel
    user: Mapping[str, str]
    hints: Mapping[str, str]
    has_whole_experts: bool
    unmatched: list[str] = field(default_factory=list)

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config.get_text_config()

    def form_around(self, name: str) -> str | None:
        """The form of the recurrent mixer that a module is in, None outside of them."""
        parents = accumulate(name.split(".")[:-1], lambda path, child: f"{path}.{child}")
        forms = (form_of_mixer(self.model.get_submodule(parent)) for parent in parents)
        return next((form for form in forms if form is not None), None)


def find_regions(
    model: PreTrainedModel, user: Mapping[str, str], modules: Collection[str], has_whole_experts: bool = False
) -> list[RegionPlan]:
    """The regions of all layers that are here, in order; layers of other pipeline stages have none.

    user: roles by pattern of module names, before all other rules. modules: names of the whole model's, of which a pattern must
    mean one. has_whole_experts: experts are not sliced.

    Raises ModelError for a module that no rule knows, and for a pattern or role of `user` that means nothing.
    """
    _check_user_plan(type(model).__name__, modules, user)
    found = find_layers(model)
    if found is None:
        raise ModelError(f"{type(model).__name__} has no list of decoder layers to split: use parallel.tp=1")
    search = _Search(model, user, getattr(model, "tp_plan", None) or {}, has_whole_experts)
    regions = [region for index in range(len(found[1])) for region in _regions(search, f"{found[0]}.{index}")]
    if search.unmatched:
        lines = "\n".join(f"  {line}" for line in dict.fromkeys(search.unmatched))
        raise ModelError(
            f"parallel.tp needs the role of every weight of {search.config.model_type}; no rule knows\n{lines}\n"
            "use parallel.tp=1, or say what they are, by name or pattern, such as\n"
            "  model.tp_plan: {'model.layers.*.mlp.up_proj': column, '*.down_proj': row, '*.router': replicated}"
        )
    return regions


def _check_user_plan(model: str, modules: Collection[str], user: Mapping[str, str]) -> None:
    for pattern, text in user.items():
        if parse_role(text) is None:
            raise ModelError(
                f"model.tp_plan.{pattern}={text} is no role: use column, row, sum, replicated, outside or norm, or one with its"
                " arrangement, such as column:heads, column:kv_heads, column:pair"
            )
        if not any(fnmatchcase(name, pattern) for name in modules):
            raise ModelError(f"model.tp_plan.{pattern} names no module of {model}: see meshwright plan")


def _regions(search: _Search, layer: str) -> Iterator[RegionPlan]:
    """The regions of one layer. Linear layers that it holds itself make one region, which the first of them enters."""
    loose: dict[str, Role] = {}
    parts = list(_find_parts(search.model.get_submodule(layer)))
    behinds = [*(child for child, _ in parts[1:]), ""]
    for (child, module), behind in zip(parts, behinds, strict=False):
        name = f"{layer}.{child}"
        role = _role(search, name, has_experts=False)
        if child.endswith(("output", "layernorm")) or (role is not None and role.kind == "outside"):
            continue
        if isinstance(module, LINEARS):
            if role is None:
                search.unmatched.append(_describe(name, module))
            elif role.kind != "replicated":
                loose[name] = role
        elif search.has_whole_experts and count_all_experts(module):
            yield from _regions_of_mixture(search, name, module)
        # Norms of the layer itself stand outside regions: whole on all ranks, of this rank's tokens.
        elif not _is_norm(name, module):
            region = _region(search, name, module, f"{layer}.{behind}.dense" if behind.endswith("output") else None)
            if region is not None:
                yield region
    _check_ends(search, loose, has_experts=False)
    if loose:
        yield RegionPlan(next(iter(loose)), loose, (), is_block=False)


def _find_parts(layer: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The parts of a layer that are called one after another, with their names. A list is called entry by entry: longcat_flash
    has two attentions in one; and so are modules in which an attention or an mlp stands beside its norm."""
    for child, module in layer.named_children():
        if isinstance(module, nn.ModuleList):
            yield from ((f"{prefix}{child}.{index}", entry) for index, entry in enumerate(module))
        elif _holds_parts(module) and not child.endswith("layernorm"):
            yield from _find_parts(module, f"{prefix}{child}.")
        else:
            yield prefix + child, module


def _holds_parts(module: nn.Module) -> bool:
    children = list(module.children())
    is_layer = any(isinstance(each, LINEARS) for each in children) or any(hasattr(module, word) for word in HEAD_WORDS)
    has_experts = count_all_experts(module) or find_unknown_experts(module)
    has_own = any(True for _ in module.parameters(recurse=False))
    return not (is_layer or has_own or has_experts) and any(any(True for _ in each.children()) for each in children)


def _regions_of_mixture(search: _Search, name: str, mixture: nn.Module) -> Iterator[RegionPlan]:
    """The regions inside a mixture of whole experts: what stands beside the experts and the routers and is split."""
    for child, module in mixture.named_children():
        full = f"{name}.{child}"
        if holds_experts(module) or child in ROUTERS:
            continue
        if count_all_experts(module):
            yield from _regions_of_mixture(search, full, module)
            continue
        region = _region(search, full, module)
        # Modules that only routers read (the statistics of a balance) are not split.
        if region is not None and any(role.kind in ("column", "row") for role in region.roles.values()):
            yield region


def _region(search: _Search, name: str, root: nn.Module, end: str | None = None) -> RegionPlan | None:
    """The region of one part of a layer, None if nothing in it has parameters. end: a row layer behind it."""
    inside = {f"{name}.{inner}" if inner else name: module for inner, module in root.named_modules()}
    experts = tuple(full for full, module in inside.items() if holds_experts(module))
    routers = {full for full in inside if full.rpartition(".")[2] in ROUTERS}
    has_experts = bool(experts) or any(".experts." in full for full in inside)
    if name in experts:
        raise ModelError(
            f"{name}: the layer itself hands on what its router has chosen, and parallel.tp does not slice such experts: use"
            " parallel.expert_tp=1, which leaves experts whole"
        )
    roles: dict[str, Role] = {}
    unmatched: list[str] = []
    for full, module in inside.items():
        own = dict(module.named_parameters(recurse=False))
        # Stacked experts are no linear layers: `split` slices them by their attributes.
        if not own or full in experts or full.rpartition(".")[0] in experts:
            continue
        # Numbers per head that an attention holds itself need no role of a module.
        if set(own) <= set(PARAMETERS) and not isinstance(module, LINEARS):
            continue
        role = _role(search, full, has_experts)
        # A router's layers route alike on all ranks, whatever they are called.
        if role is None and has_experts and any(full.startswith(f"{router}.") for router in routers):
            role = Role("replicated")
        if role is None and _is_norm(full, module):
            role = _norm_role(search, full, module)
        if end is not None and role == Role("row"):
            role = Role("column")
        # Collected, not raised: one error names everything that a user's plan has to say.
        if role is None:
            unmatched.append(_describe(full, module))
        else:
            roles[full] = role
    if not roles and not experts:
        search.unmatched += unmatched
        return None
    if end is not None:
        columns = [full for full, role in roles.items() if role.kind == "column"]
        # A norm in front of the only one (roberta-prelayernorm) stands outside.
        if len(columns) == 1:
            name, roles = columns[0], {columns[0]: roles[columns[0]]}
            unmatched = []
        roles[end] = Role("row")
    search.unmatched += unmatched
    # Behind the mixture its output is whole, within it a sum in parts (axk1's norm).
    if has_experts and any(role.kind == "outside" for role in roles.values()):
        raise ModelError(
            f"{name}: a module of the mixture computes with its output, which is in parts where experts are sliced: use"
            " parallel.expert_tp=1, which leaves experts whole"
        )
    _check_ends(search, roles, has_experts)
    return RegionPlan(name, roles, experts, is_block=has_experts)


def _check_ends(search: _Search, roles: Mapping[str, Role], has_experts: bool) -> None:
    """Note regions with only one kind of end: row layers put together what column layers take apart."""
    kinds = {role.kind for role in roles.values()} - {"replicated", "norm", "sum", "outside"}
    # Experts are both ends at once, so beside them one kind may stand alone (a shared expert's parts come in pairs anyway).
    if len(kinds) == 1 and not has_experts:
        for name, role in roles.items():
            if role.kind in kinds:
                partner = "row" if role.kind == "column" else "column"
                line = _describe(name, search.model.get_submodule(name))
                search.unmatched.append(f"{line}, taken for {role.kind}, without a {partner} beside it")


def _role(search: _Search, name: str, has_experts: bool) -> Role | None:
    """The role of a module: that of a module around it which is alike on all ranks, an indexer say, else its own."""
    around = accumulate(name.split(".")[:-1], "{}.{}".format)
    roles = [_own_role(search, each, has_experts=False) for each in around]
    alike = [role for role in roles if role is not None and role.kind in ("replicated", "outside")]
    return alike[0] if alike else _own_role(search, name, has_experts)


def _own_role(search: _Search, name: str, has_experts: bool) -> Role | None:
    """Look a module's role up: in the user's plan, the table of the recurrent mixer that it is in, the family's corrections, the
    general table, for a plain weight in Hugging Face's own plan."""
    for pattern, text in search.user.items():
        if fnmatchcase(name, pattern):
            return parse_role(text)
    leaf, form = name.rpartition(".")[2], search.form_around(name)
    if form is not None and leaf in MIXERS[form]:
        return parse_role(MIXERS[form][leaf])
    # Named for the layer that it is the weight of (moshi).
    leaf = name.removesuffix(".linear").rpartition(".")[2]
    # The same name means other things in some families, so theirs go first.
    choice = FAMILIES.get(search.config.model_type, {}).get(leaf)
    if choice is not None:
        return parse_role(choice if isinstance(choice, str) else choice(search.config))
    # Without experts a `gate` is some gating of the family's own, which nobody here knows how to split.
    if leaf in ROUTERS and not has_experts:
        return None
    if leaf in ROLES:
        return parse_role(ROLES[leaf])
    return _hinted_role(search, name)


def _hinted_role(search: _Search, name: str) -> Role | None:
    """Hugging Face's plan, of plain layers only: it does not tell how heads lie."""
    # In an attention "colwise" is not enough: an interval of a packed projection would cut through heads.
    parent = search.model.get_submodule(name.rpartition(".")[0])
    if any(hasattr(parent, word) for word in HEAD_WORDS):
        return None
    style = next((style for pattern, style in search.hints.items() if fnmatchcase(name, pattern)), "")
    return HINTS.get(style)


def _norm_role(search: _Search, name: str, norm: nn.Module) -> Role | None:
    """The role of a norm inside a region: of one head, of all heads, or with a weight for each head. A norm of hidden states is
    unknown: it may be of a sum that is still in parts."""
    parameters = dict(norm.named_parameters(recurse=False))
    parent = search.model.get_submodule(name.rpartition(".")[0])
    shape = tuple(next(iter(parameters.values())).shape)
    head_dim = next((getattr(parent, word) for word in HEAD_DIMS if hasattr(parent, word)), None)
    # One norm per head in a list (stablelm): their number would have to shrink with the heads.
    if isinstance(parent, nn.ModuleList):
        return None
    arrangement = HEAD_NORMS.get(name.rpartition(".")[2])
    if arrangement is not None and head_dim is not None and shape != (head_dim,):
        is_rms = set(parameters) == {"weight"} and shape[0] % head_dim == 0
        return Role("norm", arrangement) if len(shape) == 2 or is_rms else None
    return Role("replicated") if shape == (head_dim,) else None


def _is_norm(name: str, module: nn.Module) -> bool:
    words = (name.rpartition(".")[2].lower(), type(module).__name__.lower())
    is_leaf = not any(True for _ in module.children())
    return is_leaf and (any("norm" in word for word in words) or words[0].startswith("ln"))


def _describe(name: str, module: nn.Module) -> str:
    """With a star for numbers: what one layer has, all have."""
    shapes = ", ".join(f"{each} {tuple(p.shape)}" for each, p in module.named_parameters(recurse=False))
    return f"{re.sub(r'(?<=[.])[0-9]+(?=[.]|$)', '*', name)} ({type(module).__name__}: {shapes})"
