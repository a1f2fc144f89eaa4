"""Streams outlive their readers: each program runs in a process of its own, with stdout or stderr as a shell has left it."""

import os
import subprocess
import sys

import pytest

from framework.output import in_a_line, show_controls

# Prints more than a pipe's buffer takes, and ends with a code of its own.
PROGRAM = """
import sys
from framework.output import find_loss, keep_streams
keep_streams()
for number in range(3000):
    print("out", number, "ä" * 40)
    print("err", number, file=sys.stderr)
sys.exit(88 if find_loss() is None else 87)
"""


def run(program, shell="exec {} ", **variables):
    """The exit code and output of a program whose command a shell completes."""
    words = f'{sys.executable} -c "$PROGRAM"'
    environment = os.environ | {"PROGRAM": program, **variables}
    done = subprocess.run(
        ["bash", "-c", shell.format(words)], env=environment, capture_output=True, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("shell", "code"),
    [
        ("{} | head -1; exit ${{PIPESTATUS[0]}}", 88),
        ("{} 2>&1 | head -1; exit ${{PIPESTATUS[0]}}", 88),
        ("{} 2> /dev/full", 88),
        ("{} > /dev/full", 87),  # what was printed is lost, and nobody left
        ("{} >&- 2>&-", 88),
        ("{} <&- >&-", 88),
    ],
)
def test_a_stream_that_fails_ends_nothing_and_the_code_is_the_programs_own(shell, code):
    assert run(PROGRAM, shell)[0] == code


def test_an_unbuffered_stream_shows_each_piece_at_once():
    """The newline behind a progress bar, say: the next line may be of another stream."""
    program = """
import os, sys
from framework.output import keep_streams
keep_streams()
sys.stderr.write("bar")
sys.stderr.write("\\n")
os.write(2, b"raw")
"""
    assert run(program, PYTHONUNBUFFERED="1")[2] == b"bar\nraw"


def test_a_closed_descriptor_is_no_files():
    program = """
import os
from framework.output import keep_streams
keep_streams()
file = open("/dev/zero")
os.write(2, str(file.fileno()).encode())
print("to nobody")
"""
    code, _, err = run(program, "{} <&- >&-")
    assert (code, int(err) > 2) == (0, True)


def test_a_reader_of_a_non_blocking_pipe_gets_all():
    program = "import os\nos.set_blocking(1, False)" + PROGRAM
    code, out, _ = run(program, "{} 2> /dev/null | {{ sleep 0.3; cat; }}; exit ${{PIPESTATUS[0]}}")
    assert (code, out.count(b"\n"), out.endswith(b"out 2999 " + "ä".encode() * 40 + b"\n")) == (88, 3000, True)


def test_a_terminal_that_was_closed_ends_nothing():
    leader, terminal = os.openpty()
    program = f"import os, time\nos.close({leader})\n" + PROGRAM
    process = subprocess.Popen([sys.executable, "-c", program], stdout=terminal, stderr=terminal, pass_fds=[leader])
    os.close(terminal)
    os.close(leader)
    assert process.wait(60) in (87, 88)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_lacks_is_escaped(encoding):
    program = "from framework.output import keep_streams\nkeep_streams()\nprint('5 µs → 字 \\udc80')"
    code, out, _ = run(program, PYTHONIOENCODING=encoding)
    assert (code, out) == (0, "5 µs → 字 \udc80\n".encode(encoding, errors="backslashreplace"))


def test_control_characters_are_shown_and_lines_and_bars_stay():
    text = "\x1b[31mred\x1b]0;title\x07 \x9b2J \u202etxt.exe\u2066 \x7f\x08"
    assert show_controls(text) == r"\x1b[31mred\x1b]0;title\x07 \x9b2J \u202etxt.exe\u2066 \x7f\x08"
    for kept in ("a\tb\nc\r\nd", "\r 50%|##  |", "      \r", "naïve 字 👩‍👩‍👧"):
        assert show_controls(kept) == kept
    assert show_controls("ok\rfake") == r"ok\rfake"
    assert in_a_line("run\nmeshwright: done\r\x1b") == r"run\nmeshwright: done\r\x1b"


class TestCommands:
    """`python -m framework` as a shell starts it."""

    def start(self, words, shell="exec {} ", **variables):
        environment = os.environ | {"PYTHONPATH": os.getcwd(), **variables}
        line = shell.format(f"{sys.executable} -m framework {words}")
        done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, timeout=60, check=False)
        return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

    def test_one_that_prints_ends_well_where_its_reader_has_enough(self):
        code, out, err = self.start("check --keys", "{} | head -1; exit ${{PIPESTATUS[0]}}")
        assert (code, out.count("\n"), err) == (0, 1, "")

    def test_one_that_prints_fails_where_its_words_are_lost(self):
        for words in ("check --keys", "--version", "check --help"):
            code, _, err = self.start(words, "{} > /dev/full")
            assert (code, err.startswith("meshwright: stdout cannot be written (No space left")) == (1, True)

    def test_a_mistake_has_its_code_whoever_listens(self):
        for shell in ("{} 2>&1 | true; exit ${{PIPESTATUS[0]}}", "{} > /dev/full 2> /dev/full", "{} >&- 2>&-"):
            assert self.start("check train.steps=0", shell)[0] == 86

    def test_names_are_shown_in_any_locale(self, tmp_path):
        (tmp_path / "experiment").mkdir()
        text = "# @package _global_\n# Größe → 字\ndefaults: [quickstart]\ndata: {sources: {stdlib: {path: ordner/größe}}}\n"
        (tmp_path / "experiment" / "own.yaml").write_text(text, encoding="utf-8")
        ascii_only = {"PYTHONUTF8": "0", "LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0"}
        for variables in ({"PYTHONIOENCODING": "ascii"}, ascii_only):
            code, out, err = self.start(f"check --recipes {tmp_path} experiment=own", **variables)
            assert (code, err) == (0, "")
            assert r"ordner/gr\xf6\xdfe" in out
