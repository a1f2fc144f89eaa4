"""The house keeps its rules; and each rule's checker does see a breach."""

import subprocess
import sys
from pathlib import Path

import pytest

import framework
from framework import cli
from tests.laws import source_laws
from tests.laws.source_laws import LAWS, Source

PACKAGE = Path(framework.__file__).parent

# (law, path, source that breaks it)
BREACHES = [
    ("imports_downwards", "mesh/layout.py", "from framework.comm.duals import gather"),
    ("imports_downwards", "mesh/layout.py", "def f():\n    import framework.comm.duals"),
    ("imports_downwards", "mesh/layout.py", "from ..comm import duals"),
    ("imports_downwards", "errors.py", "from framework import cli"),
    ("imports_downwards", "optim/groups.py", "from framework.data import store"),
    ("imports_downwards", "comm/communicator.py", "import framework.attic"),
    ("imports_downwards", "attic/old.py", "import framework.errors"),
    ("parallelisms_do_not_know_each_other", "parallel/tensor.py", "from framework.parallel import sequence"),
    ("parallelisms_do_not_know_each_other", "parallel/tensor.py", "from .parallelize import parallelize"),
    (
        "parallelisms_do_not_know_each_other",
        "parallel/zero/buffers.py",
        "from framework.parallel.pipeline import actions",
    ),
    ("parallelisms_do_not_know_each_other", "parallel/zero/buffers.py", "from ..pipeline.actions import Action"),
    ("the_oracle_shares_nothing", "verify/oracle.py", "from framework.optim.groups import group_parameters"),
    ("the_oracle_shares_nothing", "verify/plain.py", "from framework.verify.layout import share"),
    ("the_oracle_shares_nothing", "verify/oracle.py", "def f():\n    import framework.optim.groups"),
    ("only_comm_communicates", "optim/optimizers.py", "import torch.distributed as dist"),
    ("only_comm_communicates", "optim/optimizers.py", "from torch import distributed"),
    ("only_comm_communicates", "optim/optimizers.py", "from torch.distributed import all_reduce"),
    ("only_comm_communicates", "optim/optimizers.py", "import torch\ndef f(x):\n    torch.distributed.all_reduce(x)"),
    ("only_transfer_sends_to_devices", "train/step.py", "sums = torch.tensor([0.0], device=device)"),
    ("only_transfer_sends_to_devices", "train/step.py", "x = x.to(device, non_blocking=True)"),
    ("only_transfer_sends_to_devices", "data/loader.py", "x = x.pin_memory()"),
    ("no_index_is_a_list", "parallel/attention/ring.py", "sums[[each for each in range(4) if each > 1]] = 0"),
    ("no_index_is_a_list", "parallel/zero/parameters.py", "filled = [1, 2]\nlargest[filled] = found"),
    *(
        ("only_torch_private_knows_private_names", "train/step.py", text)
        for text in (
            "from torch.utils._pytree import tree_map",
            "from torch.autograd.graph import _engine_run_backward",
            "import torch._dynamo as dynamo",
            "import torch\ndef f():\n    torch._dynamo.reset()",
            "import torch.distributed as dist\ndef f(x):\n    dist._all_gather_base(x)",
            "from torch import ops\naten = ops.aten\ncopy = aten._to_copy",
            "def f(x):\n    return x._version",
            "def f(module):\n    return getattr(module, '_parameters')",
        )
    ),
    ("mesh_is_integers", "mesh/layout.py", "import torch"),
    ("mesh_is_integers", "mesh/connect.py", "import torch.distributed as dist"),
    ("recipe_is_instant", "recipe/check.py", "def f():\n    from transformers import AutoConfig"),
    ("recipe_is_instant", "recipe/check.py", "import numpy as np"),
    ("only_connect_launch_and_cli_read_the_environment", "track/trackers.py", "import os\nkey = os.environ['KEY']"),
    ("only_connect_launch_and_cli_read_the_environment", "track/trackers.py", "import os\nkey = os.environ.get('KEY')"),
    ("only_connect_launch_and_cli_read_the_environment", "track/trackers.py", "import os\nkey = os.getenv('KEY')"),
    ("only_connect_launch_and_cli_read_the_environment", "track/trackers.py", "from os import environ"),
    ("nothing_is_global", "train/loop.py", "step = 0\ndef f():\n    global step\n    step += 1"),
    ("foreign_code_never_runs", "model/load.py", "config = AutoConfig.from_pretrained(folder)"),
    ("foreign_code_never_runs", "model/load.py", "AutoConfig.from_pretrained(folder, trust_remote_code=yes)"),
    ("foreign_code_never_runs", "checkpoint/load.py", "import torch\nstate = torch.load(file)"),
    ("modules_hold_no_state", "train/loop.py", "seen = {}"),
    ("modules_hold_no_state", "train/loop.py", "seen: list[int] = []"),
    ("modules_hold_no_state", "train/loop.py", "seen = set(range(3))"),
    ("modules_hold_no_state", "train/loop.py", "_counter = itertools.count()"),
    ("modules_hold_no_state", "train/loop.py", "manager = StateManager()"),
    ("modules_hold_no_state", "train/loop.py", "class Loop:\n    seen = {}"),
    ("modules_hold_no_state", "train/loop.py", "SEEN = {}\ndef f(x):\n    SEEN[x] = 1"),
    ("modules_hold_no_state", "train/loop.py", "SEEN = {}\ndef f(x):\n    del SEEN[x]"),
    ("modules_hold_no_state", "train/loop.py", "SEEN = []\ndef f(x):\n    SEEN.append(x)"),
    ("modules_hold_no_state", "train/loop.py", "SEEN = set()\ndef f(x):\n    SEEN.add(x)"),
    ("modules_hold_no_state", "train/loop.py", "SEEN = []\nSEEN += [1]"),
    ("modules_hold_no_state", "train/loop.py", "STATE = State()\ndef f(x):\n    STATE.step = x"),
    ("modules_hold_no_state", "train/loop.py", "from framework.mesh.topology import NAMES\nNAMES.update(x=1)"),
    ("docstrings_name_the_thing", "mesh/layout.py", '"""What a box is."""'),
    ("docstrings_name_the_thing", "mesh/layout.py", 'def f():\n    """Of all boxes."""'),
    ("docstrings_name_the_thing", "mesh/layout.py", 'class Box:\n    """The one that is asked for."""'),
    ("docstrings_name_the_thing", "mesh/layout.py", 'class Box:\n    size: int\n    """Of the box."""'),
    ("comments_name_the_thing", "mesh/layout.py", "# Of a box.\nSIDES = 4"),
    ("options_are_passed_by_name", "cli.py", "export_command(run, arguments.to, best=arguments.best)"),
    ("options_are_passed_by_name", "commands/search.py", "describe(result, name, asked.options.best)"),
]

# (path, source that keeps every law)
KEPT = [
    ("comm/duals.py", "import torch.distributed as dist\nfrom framework.mesh.topology import Axis"),
    (
        "torch_private.py",
        "from torch.utils._pytree import tree_map\nimport torch.distributed\ndef f(x):\n    return x._version",
    ),
    (
        "model/load.py",
        "import torch\nclass A:\n    _version = 1\n    def f(self):\n        torch._foreach_neg(self._version)",
    ),
    ("comm/connect.py", "import os\nimport torch.distributed as dist\nrank = os.environ['RANK']"),
    ("launch/agent.py", "from torch.distributed.launcher.api import elastic_launch\nimport os\nx = os.environ"),
    ("cli.py", "import os\nos.environ['A'] = 'b'\nfrom framework.train.build import build"),
    ("__main__.py", "from framework.cli import main"),
    ("parallel/parallelize.py", "from framework.parallel.zero.buffers import plan\nfrom .pipeline import actions"),
    ("parallel/zero/reduce.py", "from framework.parallel.zero.buffers import plan\nfrom . import buffers"),
    (
        "optim/optimizers.py",
        "NAMES = {'a': 1}\nSIZES = [1]\npattern = re.compile('a')\ndef f(B, T):\n    T += NAMES['a']\n    return T",
    ),
    ("cli.py", "train(recipe, arguments.overrides, arguments.recipes)\nfind(arguments.run, step=arguments.step)"),
    ("recipe/schema.py", "from dataclasses import dataclass\n__all__ = ['a']\nKey = TypeVar('Key')"),
    ("train/loop.py", "def f():\n    seen = []\n    seen.append(1)\n    return seen"),
]


@pytest.fixture(scope="module")
def sources():
    """Every file of the package, parsed once for all laws."""
    return [Source(str(file.relative_to(PACKAGE)), file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_house_keeps(law, sources):
    assert sources
    breaches = [f"framework/{source.path}:{line}: {what}" for source in sources for line, what in sorted(law(source))]
    assert not breaches, "\n" + "\n".join(breaches)


def test_scripts_have_docstrings_that_name_the_thing():
    files = [Source(str(file), file.read_text()) for file in sorted((PACKAGE.parent / "scripts").rglob("*.py"))]
    assert files
    assert not [(each.path, *breach) for each in files for breach in source_laws.docstrings_name_the_thing(each)]


@pytest.mark.parametrize(("law", "path", "text"), BREACHES)
def test_a_breach_is_seen_by_its_law(law, path, text):
    assert list(getattr(source_laws, law)(Source(path, text)))


@pytest.mark.parametrize(("path", "text"), KEPT)
def test_what_is_allowed_breaks_no_law(path, text):
    assert [breach for law in LAWS for breach in law(Source(path, text))] == []


def test_no_class_name_is_used_twice(sources):
    assert source_laws.find_classes_twice(sources) == {}


def test_a_class_name_that_is_used_twice_is_seen():
    files = [Source(f"{room}.py", "class Run:\n    pass") for room in ("train", "model")]
    assert source_laws.find_classes_twice(files) == {"Run": ["train.py", "model.py"]}


def test_every_law_has_a_breach_to_see():
    assert {law.__name__ for law in LAWS} == {law for law, _, _ in BREACHES}


def test_rooms_without_torch_do_not_import_it_indirectly():
    """In a fresh interpreter, since this one has torch already. A rank imports it late: threads are set before. No command
    imports it for its `--help`."""
    files = [*(PACKAGE / "recipe").glob("*.py"), *(PACKAGE / "mesh").glob("*.py")]
    names = sorted(f"framework.{file.parent.name}.{file.stem}" for file in files)
    commands = [
        "framework.train.program",
        *(f"framework.commands.{command.file or command.name}" for command in cli.COMMANDS),
    ]
    imports = f"import sys, {', '.join([*names, *commands])}"
    program = f"{imports}\nprint({{'torch', 'transformers', 'datasets'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "set()", f"{done.stdout}{done.stderr}"
