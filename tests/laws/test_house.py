"""The house in numbers, by `scripts/measure_source.py`: short functions, few parameters, and the hard rooms explained."""

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_source.py"
FRAMEWORK = Path(__file__).parents[2] / "framework"
HARD_ROOMS = ("parallel/zero", "parallel/pipeline", "parallel/tensor", "parallel/experts", "parallel/attention", "comm")


@pytest.fixture(scope="module")
def source() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_source", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_functions_are_short(source: ModuleType) -> None:
    found = source.measure(source.files_of(FRAMEWORK))
    assert found.median_lines <= 8
    assert found.p95_lines <= 26


def test_no_function_of_parallel_takes_more_than_seven_parameters(source: ModuleType) -> None:
    files = [each for each in source.files_of(FRAMEWORK / "parallel") if not each.name.startswith("triton_")]
    functions = source.measure(files).functions
    assert not [f"{each.path}:{each.line} {each.name}" for each in functions if each.num_parameters > 7]


def test_the_spine_is_short() -> None:
    assert len((FRAMEWORK / "train" / "build.py").read_text().splitlines()) <= 150


def test_tests_that_pages_name_exist() -> None:
    """By their names, and files by their paths: a page that says what pins a claim must not outlive it."""
    root = FRAMEWORK.parent
    files = {str(each.relative_to(root)): each.read_text() for each in (root / "tests").rglob("*.py")}
    known = {*files, *(name for text in files.values() for name in re.findall(r"def (test_\w+)\(", text))}
    known |= {Path(each).stem for each in files}
    named = re.compile(r"tests/[\w/]+\.py|(?<![\w/])test_\w+")
    pages = {each: named.findall(each.read_text()) for each in [root / "README.md", *(root / "docs").rglob("*.md")]}
    assert sum(map(len, pages.values())) > 100
    assert not [(page.name, name) for page, names in pages.items() for name in names if name not in known]


@pytest.mark.parametrize("room", HARD_ROOMS)
def test_hard_code_says_why(room: str, source: ModuleType) -> None:
    found = source.measure(source.files_of(FRAMEWORK / room))
    assert found.comments_per_100 >= 8, f"{found.comment_lines} comment lines on {found.code_lines} lines of code"


def imports_of(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it, for types too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import one another around a cycle; none if there is no cycle. What imports nothing of the rest goes first."""
    rest = dict(graph)
    while free := [name for name, needed in rest.items() if not needed & rest.keys() - {name}]:
        for name in free:
            del rest[name]
    return sorted(rest)


def test_no_module_imports_itself_around_a_cycle() -> None:
    files = {
        "framework." + ".".join(path.relative_to(FRAMEWORK).with_suffix("").parts): path
        for path in FRAMEWORK.rglob("*.py")
        if path.name != "__init__.py"
    }
    graph = {name: imports_of(path) & files.keys() for name, path in files.items()}
    assert sum(map(len, graph.values())) > len(files)
    assert find_cycle(graph) == []
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == ["a", "b", "c", "d"]


def test_what_is_measured_is_measured(source: ModuleType, tmp_path: Path) -> None:
    """A docstring is neither code nor comment, a trailing comment is one, `self` is no parameter."""
    text = '"""Doc."""\n\n# why\ndef f(self, a, *, b=1):\n    """Doc."""\n    x = a  # why, too\n\n    return x\n'
    (tmp_path / "a.py").write_text(text)
    found = source.measure([tmp_path / "a.py"])
    (function,) = found.functions
    assert (found.code_lines, found.comment_lines, function.lines, function.num_parameters) == (3, 2, 3, 2)
