"""`make try` types each option of each command: what it must show is beside it."""

import argparse
import importlib.util
import shlex
import sys
from pathlib import Path

from framework import cli


def load_actions():
    path = Path(cli.__file__).parents[1] / "scripts" / "try_as_user.py"
    spec = importlib.util.spec_from_file_location("try_as_user", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass asks for it
    spec.loader.exec_module(module)
    return module.ACTIONS


def find_untyped(actions):
    """(command, option) of the parsers that no action types."""
    typed = [(shlex.split(action.typed), action) for action in actions]
    untyped = []
    for command in cli.COMMANDS:
        parser = argparse.ArgumentParser(add_help=False)
        command.add_options(parser)
        names = [
            each.option_strings for each in parser._actions if each.option_strings and each.help != argparse.SUPPRESS
        ]
        mine = [
            {word.partition("=")[0] for word in words}
            for words, each in typed
            if words[0] == command.name and each.seen
        ]
        untyped += [(command.name, "")] * (not mine)
        untyped += [(command.name, each[-1]) for each in names if not any(words.intersection(each) for words in mine)]
    for shared in ("--recipes", "--help-recipe"):
        untyped += [("", shared)] * (not any(shared in words for words, _ in typed))
    return untyped


def test_every_option_of_every_command_is_typed_by_an_action():
    assert find_untyped(load_actions()) == []


def test_an_option_that_no_action_types_is_noticed():
    without = [action for action in load_actions() if "--rejections" not in action.typed]
    assert ("search", "--rejections") in find_untyped(without)
