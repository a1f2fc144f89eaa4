"""The rules of the house that can be read off the source, each as a function from a source file to what breaks the
rule in it.

A rule is a generator of (line, what is wrong). They see syntax only, so that a rule about `import` also sees the
imports inside functions.
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

Breach = tuple[int, str]
Law = Callable[["Source"], Iterator[Breach]]

# Lowest first; rooms of one floor do not know each other.
FLOORS = (
    ("errors", "files", "host", "imports", "output", "start"),
    ("lease", "object_store"),
    ("recipe",),
    ("mesh",),
    ("torch_private",),
    ("comm",),
    ("model",),
    ("parallel",),
    ("optim", "data"),
    ("plan",),
    ("checkpoint", "track"),
    ("extend",),
    ("monitor",),
    ("faults", "launch"),
    ("train",),
    ("verify",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
FLOOR_OF_ROOM = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Files of verify/ that are the oracle, or that both sides read; and what they may know of the framework: the names of the
# recipe's keys, and the errors that the user reads.
ORACLE = (
    "oracle",
    "plain",
    "plain_optimizers",
    "plain_rounding",
    "evidence",
    "compare",
)
ORACLE_KNOWS = ("framework.errors", "framework.recipe.schema", *(f"framework.verify.{name}" for name in ORACLE))

MUTABLE_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
REFUSED_OPENINGS = ("What", "Of", "Those", "As", "By", "That", "Which", "Who", "Whom", "Whose", "How")
# Calls whose result nobody can change, or (loggers) that the standard library keeps anyway.
HARMLESS_CALLS = {
    "re.compile", "getattr", "frozenset", "tuple", "str", "int", "float", "partial", "functools.partial", "MappingProxyType",
    "logging.getLogger", "TypeVar", "ParamSpec", "NewType", "namedtuple", "attrgetter", "itemgetter", "Path",
}  # fmt: skip
MUTATING_METHODS = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end", "pop", "popitem", "popleft",
    "remove", "reverse", "setdefault", "sort", "update",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """One file: its path relative to the package folder, such as `mesh/layout.py`, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree, walked once for all laws."""
        return list(ast.walk(self.tree))

    @property
    def parts(self) -> tuple[str, ...]:
        """("mesh", "box")."""
        return tuple(self.path.removesuffix(".py").split("/"))

    @property
    def room(self) -> str:
        return self.parts[0]

    @cached_property
    def imports(self) -> frozenset[tuple[int, str]]:
        """(line, dotted name) of all imports; `from a.b import c` is a.b.c, relative ones are made absolute."""
        return frozenset(self._imports())

    @cached_property
    def dotted_names(self) -> frozenset[tuple[int, str]]:
        """(line, dotted name) of every attribute chain that starts at a name: os.environ.get, os.environ."""
        attributes = (node for node in self.nodes if isinstance(node, ast.Attribute))
        return frozenset((node.lineno, name) for node in attributes if (name := dotted(node)))

    def _imports(self) -> Iterator[tuple[int, str]]:
        package = ("framework", *self.parts[:-1])
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                origin = node.module.split(".") if node.module else []
                if node.level:
                    origin = [*package[: len(package) - node.level + 1], *origin]
                for alias in node.names:
                    yield node.lineno, ".".join([*origin, alias.name])


def dotted(node: ast.AST) -> str | None:
    """The name that `a`, `a.b` or `a.b.c` spells; None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return None


def imports_downwards(source: Source) -> Iterator[Breach]:
    """A room imports from lower floors or from itself."""
    for line, name in source.imports:
        if not name.startswith("framework."):
            continue
        target = name.split(".")[1]
        if source.room not in FLOOR_OF_ROOM or target not in FLOOR_OF_ROOM:
            yield line, f"{source.room} imports {target}: both must stand in the list of floors"
        elif target != source.room and FLOOR_OF_ROOM[target] >= FLOOR_OF_ROOM[source.room]:
            yield line, f"{source.room} imports {name}, which is not on a lower floor"


def parallelisms_do_not_know_each_other(source: Source) -> Iterator[Breach]:
    """Modules of `parallel` meet in parallelize.py only; a subpackage is one module. All may know what
    a StagePlan is."""
    if source.room != "parallel" or source.parts[1] == "parallelize":
        return
    for line, name in source.imports:
        if name.startswith("framework.parallel.") and name.split(".")[2] not in (source.parts[1], "stage_plan"):
            yield line, f"parallel/{source.parts[1]} imports {name}: they meet in parallelize.py only"


def the_oracle_shares_nothing(source: Source) -> Iterator[Breach]:
    """The oracle of `verify` imports nothing that it judges."""
    if source.room != "verify" or source.parts[1] not in ORACLE:
        return
    for line, name in source.imports:
        is_known = any(name == known or name.startswith(f"{known}.") for known in ORACLE_KNOWS)
        if name.split(".")[0] == "framework" and not is_known:
            yield line, f"verify/{source.parts[1]} imports {name}, which the oracle judges: write it again, plainly"


def only_comm_communicates(source: Source) -> Iterator[Breach]:
    """torch.distributed appears in comm/, launch/ (for its elastic launcher) and torch_private.py."""
    if source.room in ("comm", "launch", "torch_private"):
        return
    for line, name in source.imports | source.dotted_names:
        if name.startswith("torch.distributed"):
            yield line, f"{name}: collectives go through comm/"


def only_transfer_sends_to_devices(source: Source) -> Iterator[Breach]:
    """Below `build`, tensors of the host's values are made for a device, and copies that need not wait started, in
    comm/transfer.py only."""
    if source.room not in ("parallel", "optim", "data", "monitor", "faults", "train"):
        return
    for node in source.nodes:
        if isinstance(node, ast.Call):
            given = {keyword.arg for keyword in node.keywords}
            makes = dotted(node.func) in ("torch.tensor", "torch.as_tensor") and "device" in given
            if makes or given & {"non_blocking", "pin_memory"} or (dotted(node.func) or "").endswith(".pin_memory"):
                yield node.lineno, "a copy that makes the host wait: send it by comm/transfer.py"


def no_index_is_a_list(source: Source) -> Iterator[Breach]:
    """In the rooms of a step nothing is indexed by a list of numbers: torch sends it from pageable memory, and waits."""
    if source.room not in ("parallel", "optim", "model", "comm", "train"):
        return
    statements = [node for node in source.nodes if isinstance(node, ast.stmt)]
    named = {name for node in statements for name, value in _bindings(node) if _is_list(value)}
    for node in source.nodes:
        if isinstance(node, ast.Subscript) and (_is_list(node.slice) or dotted(node.slice) in named):
            yield node.lineno, "an index that is a list makes the host wait: write to each place"


def _is_list(value: ast.expr) -> bool:
    is_of_names = isinstance(value, ast.List) and any(isinstance(getattr(x, "value", None), str) for x in value.elts)
    return isinstance(value, ast.List | ast.ListComp) and not is_of_names


def only_torch_private_knows_private_names(source: Source) -> Iterator[Breach]:
    """Private names of torch stand in torch_private.py only: of its modules, and of its objects where the file does not bind such
    a name itself. `torch._foreach_*` is documented."""
    if source.room == "torch_private":
        return
    named = dict(_aliases(source))
    for line, name in source.imports | source.dotted_names:
        parts = _spell_out(name, named).split(".")
        if parts[0] == "torch" and any(_is_private(part) and not part.startswith("_foreach_") for part in parts):
            yield line, f"{name} is private of torch"
    own = {node.name for node in source.nodes if isinstance(node, ast.FunctionDef)}
    own |= {name for node in source.nodes if isinstance(node, ast.stmt) for name, _ in _bindings(node)}
    own |= {node.attr for node in source.nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    for node in source.nodes:
        match node:
            case ast.Attribute(ast.Name("self" | "cls"), name) if name in own:
                pass
            case ast.Attribute(attr=name) | ast.Call(ast.Name("getattr"), [_, ast.Constant(name), *_]):
                if name in _private_names_of_objects():
                    yield node.lineno, f".{name} is private of torch's objects"


def mesh_is_integers(source: Source) -> Iterator[Breach]:
    """mesh/ needs no torch."""
    if source.room == "mesh":
        yield from _imports_of(source, {"torch", "transformers"})


def recipe_is_instant(source: Source) -> Iterator[Breach]:
    """recipe/ imports nothing that takes long to import."""
    if source.room == "recipe":
        yield from _imports_of(source, {"torch", "transformers", "datasets", "numpy", "wandb", "matplotlib"})


def only_connect_launch_and_cli_read_the_environment(source: Source) -> Iterator[Breach]:
    """os.environ appears in comm/connect.py, launch/, commands/, cli.py and start.py."""
    if source.room in ("launch", "commands", "cli", "start") or source.path == "comm/connect.py":
        return
    readers = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")
    for line, name in source.imports | source.dotted_names:
        if name in readers:
            yield line, f"{name}: pass it as an argument"


def nothing_is_global(source: Source) -> Iterator[Breach]:
    """No `global` statement."""
    for node in source.nodes:
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"


def foreign_code_never_runs(source: Source) -> Iterator[Breach]:
    """transformers is told that no code of a folder is trusted wherever an Auto class loads one, and nothing is unpickled from
    files."""
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func) or ""
        trusted = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
        is_loader = name.startswith("Auto") and name.endswith(".from_pretrained")
        if is_loader and trusted.get("trust_remote_code") is not False:
            yield node.lineno, f"{name} without trust_remote_code=False"
        if name in ("torch.load", "pickle.load") or trusted.get("allow_pickle"):
            yield node.lineno, f"{name} runs what the file says"


def modules_hold_no_state(source: Source) -> Iterator[Breach]:
    """A module-level name is a constant: in capitals if its value could be changed, and then nobody changes it."""
    for node in source.tree.body:
        for name, value in _bindings(node):
            if name.upper() != name and not name.startswith("__") and _can_change(value):
                yield node.lineno, f"{name} is a mutable object of the module: pass it as an argument"
        for member in node.body if isinstance(node, ast.ClassDef) else []:
            for name, value in _bindings(member):
                if not name.startswith("__") and isinstance(value, MUTABLE_DISPLAYS):
                    yield member.lineno, f"{node.name}.{name} is one mutable object for all instances"
    constants = _constants(source)
    for node in source.nodes:
        for changed in _changed_by(node):
            if (name := dotted(changed)) and name.split(".")[0] in constants:
                yield changed.lineno, f"{name} is a constant and is changed here"


def options_are_passed_by_name(source: Source) -> Iterator[Breach]:
    """An option of the command line is a function's first argument or has its parameter's name: of argparse's values the type
    checker knows no type, so it sees no swap."""
    if source.room not in ("cli", "commands", "launch"):
        return
    for call in (node for node in source.nodes if isinstance(node, ast.Call)):
        for value in call.args[1:]:
            owner, _, option = (dotted(value) or "").rpartition(".")
            if owner.split(".")[-1] in ("arguments", "options") and option not in ("overrides", "recipes"):
                yield value.lineno, f"{owner}.{option} is passed by its place: pass it by name"


def docstrings_name_the_thing(source: Source) -> Iterator[Breach]:
    """A docstring, also that of a field, begins with a noun phrase or an imperative, as those of PyTorch do."""
    for node in source.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for each in node.body:
                match each:
                    case ast.Expr(ast.Constant(str(text))):
                        if _opens_as_refused(text):
                            yield each.lineno, f"a docstring begins with {' '.join(text.split()[:4])!r}"


def comments_name_the_thing(source: Source) -> Iterator[Breach]:
    """A comment on lines of its own begins as docstrings do."""
    lines = ["", *map(str.strip, source.text.splitlines())]
    for number, (before, line) in enumerate(pairwise(lines), start=1):
        if line.startswith("# ") and not before.startswith("#") and _opens_as_refused(line[2:]):
            yield number, f"a comment begins with {' '.join(line.split()[1:5])!r}"


def _opens_as_refused(text: str) -> bool:
    return text.startswith("The one that") or text.split(maxsplit=1)[0].strip(",.:;") in REFUSED_OPENINGS


LAWS: tuple[Law, ...] = (
    imports_downwards,
    parallelisms_do_not_know_each_other,
    the_oracle_shares_nothing,
    only_comm_communicates,
    only_transfer_sends_to_devices,
    no_index_is_a_list,
    only_torch_private_knows_private_names,
    mesh_is_integers,
    recipe_is_instant,
    only_connect_launch_and_cli_read_the_environment,
    nothing_is_global,
    foreign_code_never_runs,
    modules_hold_no_state,
    options_are_passed_by_name,
    docstrings_name_the_thing,
    comments_name_the_thing,
)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def _private_names_of_objects() -> frozenset[str]:
    """Private attributes of what torch hands out: tensors and their memory, modules, nodes of a graph, operators, groups."""
    import torch
    from torch.autograd.graph import Node
    from torch.distributed import ProcessGroup

    found = torch.ones(()), torch.UntypedStorage, torch.nn.Module(), Node, torch.ops.aten.add.Tensor, ProcessGroup
    return frozenset(name for each in found for name in dir(each) if _is_private(name))


def _aliases(source: Source) -> Iterator[tuple[str, str]]:
    """(name, dotted name) of `import torch.distributed as dist`, of `from torch import ops` and of `aten = ops.aten`."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((each.asname, each.name) for each in node.names if each.asname)
        elif isinstance(node, ast.ImportFrom):
            yield from ((each.asname or each.name, f"{node.module}.{each.name}") for each in node.names)
    for node in source.tree.body:
        yield from ((alias, name) for alias, value in _bindings(node) if (name := dotted(value)))


def _spell_out(name: str, named: dict[str, str]) -> str:
    """A dotted name with the first of its parts as it was imported or bound."""
    for _ in range(3):
        first, dot, rest = name.partition(".")
        name = f"{named.get(first, first)}{dot}{rest}"
    return name


def _imports_of(source: Source, packages: set[str]) -> Iterator[Breach]:
    for line, name in source.imports:
        if name.split(".")[0] in packages:
            yield line, f"{source.path} imports {name}"


def _bindings(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """(name, value) of a plain or annotated assignment to names."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
        yield node.target.id, node.value


def _can_change(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return dotted(value.func) not in HARMLESS_CALLS
    return isinstance(value, MUTABLE_DISPLAYS)


def _constants(source: Source) -> set[str]:
    """Names in capitals that the module binds or imports; inside functions, capitals are shapes."""
    bound = {name for node in source.tree.body for name, _ in _bindings(node)}
    imported = {name.split(".")[-1] for _, name in source.imports}
    return {name for name in bound | imported if name.upper() == name and not name.startswith("__")}


def _changed_by(node: ast.AST) -> Iterator[ast.expr]:
    """The objects that a statement or call changes in place: x of `x[...] = `, `x.a = `, `del x[...]`, `x += `,
    `x.append()`."""
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
        if isinstance(node, ast.AugAssign):
            yield node.target
    else:
        targets = []
    for target in targets:
        if isinstance(target, ast.Subscript | ast.Attribute):
            yield target.value
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if is_method and node.func.attr in MUTATING_METHODS:
        yield node.func.value


def find_classes_twice(sources: Iterable[Source]) -> dict[str, list[str]]:
    """Names of classes that more than one file of the package defines, with their files."""
    files: dict[str, list[str]] = {}
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(source.path)
    return {name: paths for name, paths in files.items() if len(paths) > 1}
