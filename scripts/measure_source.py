"""The house in numbers: how long functions are, how many parameters they take, how much of the hard code is explained.

    python scripts/measure_source.py [ROOT]

Prints for each room: files, code lines (neither blank, comment nor docstring), comment lines per 100 of them, lines per function
(median, 95th percentile, largest) and the most parameters of a function; then what `tests/laws/test_house.py` holds to.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

FRAMEWORK = Path(__file__).parents[1] / "framework"


@dataclass(frozen=True)
class Function:
    """lines: of its body without docstring, comments and blank lines, the signature's included."""

    path: Path
    name: str
    line: int
    lines: int
    num_parameters: int


@dataclass(frozen=True)
class Measures:
    """Counts of some files. code_lines: neither blank, comment nor docstring; comment_lines: lines on which a comment stands."""

    files: int
    code_lines: int
    comment_lines: int
    functions: tuple[Function, ...]

    @property
    def comments_per_100(self) -> float:
        return 100 * self.comment_lines / max(self.code_lines, 1)

    @property
    def median_lines(self) -> float:
        return median(each.lines for each in self.functions)

    @property
    def p95_lines(self) -> float:
        return quantiles((each.lines for each in self.functions), n=20, method="inclusive")[-1]

    @property
    def longest(self) -> Function:
        return max(self.functions, key=lambda each: each.lines)

    @property
    def widest(self) -> Function:
        return max(self.functions, key=lambda each: each.num_parameters)


def measure(paths: list[Path]) -> Measures:
    """Measure these files together."""
    code = comments = 0
    functions: list[Function] = []
    for path in paths:
        lines, with_comment, tree = _read(path)
        code += len(lines)
        comments += len(with_comment)
        functions += _functions(path, tree, lines)
    return Measures(len(paths), code, comments, tuple(functions))


def _read(path: Path) -> tuple[set[int], set[int], ast.Module]:
    """Numbers of code lines, numbers of lines with a comment, and the syntax tree."""
    text = path.read_text()
    tree = ast.parse(text)
    docstrings = {line for node in _docstrings(tree) for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    code, comments = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and "noqa" not in token.string and "type: ignore" not in token.string:
            comments.add(token.start[0])
        elif token.type not in skipped:
            code |= set(range(token.start[0], token.end[0] + 1))
    return code - docstrings, comments, tree


def _docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield first


def _functions(path: Path, tree: ast.Module, code: set[int]) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = sum(line in code for line in range(node.lineno, (node.end_lineno or 0) + 1))
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = [each.arg for each in arguments if each.arg not in ("self", "cls", "ctx")]
            yield Function(path, node.name, node.lineno, lines, len(names))


def files_of(room: Path) -> list[Path]:
    """The Python files of a room, of all its folders."""
    return [room] if room.is_file() else sorted(room.rglob("*.py"))


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else FRAMEWORK
    parallel = root / "parallel"
    rooms = [each for each in sorted(root.iterdir()) if files_of(each) and not each.name.startswith("__")]
    rooms += [each for each in sorted(parallel.iterdir()) if each.is_dir() and files_of(each)]
    print(
        f"{'room':<24}{'files':>6}{'code':>8}{'comments/100':>14}{'median':>8}{'p95':>6}{'longest':>9}{'parameters':>12}"
    )
    for room in [root, *rooms]:
        found = measure(files_of(room))
        if len(found.functions) < 2:
            continue
        name = str(room.relative_to(root)) if room != root else "all"
        print(
            f"{name:<24}{found.files:>6}{found.code_lines:>8}{found.comments_per_100:>14.1f}{found.median_lines:>8.0f}"
            f"{found.p95_lines:>6.0f}{found.longest.lines:>9}{found.widest.num_parameters:>12}"
        )


if __name__ == "__main__":
    main()
