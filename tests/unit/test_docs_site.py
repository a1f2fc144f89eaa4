"""The site of docs/ builds without a broken link, shows what GitHub shows, and asks nothing of the network."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.grid import IN_TURN

pytestmark = IN_TURN

REPOSITORY = Path(__file__).parents[2]
# Where a page loads something from, and where a reader may go to: only the first must be here.
LOADING = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}


# What newcomers ask, the page that answers, and what the answer has to have.
QUESTIONS = [
    ("How do I begin?", "readme", r"make train"),
    ("My 8B model does not fit on 8 GPUs. What do I change first?", "fit", r"optimizer, master.*zero\.stage=1"),
    ("What does stage 3 send that stage 1 does not?", "zero", r"2k \(n-1\)/n P_c"),
    ("How many microbatches keep a pipeline from idling?", "pipeline", r"\(P - 1\) / \(M \+ P - 1\)"),
    ("Are eight GPUs the same run as one?", "data_parallel", r"dp x accumulation x sequences_per_microbatch"),
    ("Which parallelism may cross nodes?", "mesh", r"across nodes"),
    ("How long may a batch hide ZeRO-3's messages?", "choosing", r"T > F / B"),
    ("How do I train on 128k tokens?", "context", r"llama3_1_8b_128k"),
    ("May a run go on with fewer GPUs?", "readme", r"on fewer ranks: the same run"),
    ("What happens when a node dies at night?", "slurm", r"a node is lost"),
    ("Which exit codes mean: run it again?", "hosts", r"85.*run the same command again"),
    ("What is a microbatch?", "words", r"microbatch.*computes at once"),
    ("How do I train on my conversations?", "finetuning", r"data\.sources\.\w+\.messages|sft_qwen3_0_6b"),
    ("How fast would my own machine be?", "foresight", r"doctor --measure"),
    (
        "My own 13B model does not fit on 8 GPUs of 80 GB.",
        "fit",
        r"zero\.stage=3.*yes, and fastest.*model\.config_file",
    ),
    ("What does ZeRO-2 hold per GPU?", "zero", r"2\s*cP\s*4P/n\s*4P/n\s*4sP/n"),
    ("How do I resume on half of the nodes?", "slurm", r"meshwright submit run\.id=RUN launch\.nodes=4"),
    ("How do I add my own loss?", "extend", r'@loss\("focal"\).*loss\.name=focal'),
    ("How do I read data from S3?", "data", r"Text in an object store is no source.*data\.root=s3://"),
    ("How do I compare two runs?", "metrics", r"meshwright diff one four"),
    ("What does a hang report tell?", "reliability", r"The report names the call"),
    ("How do I evaluate during training?", "evaluation", r"eval\.every_steps"),
    ("When is pp better than tp?", "pipeline", r"links between nodes are slow pp across nodes, tp or dp inside"),
]


class Page(HTMLParser):
    """Files that a page loads, and the text of its paragraphs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.words: list[str] = []
        self.paragraphs: list[str] = []
        self._is_inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value for name, value in attrs if (tag, name) in LOADING and value]
        if tag == "p":
            self._is_inside = True
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        self._is_inside = self._is_inside and tag != "p"

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._is_inside:
            self.paragraphs[-1] += data


def build(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", *options]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[Path, Page]:
    """Pages of a strict build, by their paths."""
    if not find_spec("material"):
        pytest.skip("mkdocs-material is not installed: pip install 'meshwright[docs]'")
    folder = tmp_path_factory.mktemp("site")
    built = build("--site-dir", str(folder))
    assert built.returncode == 0, built.stderr
    return {path: Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}


def test_every_page_is_built(site):
    pages = {path.stem for path in site}
    assert pages >= {path.stem for path in (REPOSITORY / "docs").rglob("*.md")} | {"readme"}


def test_a_broken_link_ends_the_build(site, tmp_path):
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "index.md").write_text("# One\n\n[a](nowhere.md) and [b](readme.md#nowhere)\n")
    config = f"INHERIT: {REPOSITORY}/mkdocs.yml\ndocs_dir: pages\nsite_dir: site\nhooks: [{REPOSITORY}/scripts/docs_site.py]\n"
    (tmp_path / "mkdocs.yml").write_text(config + "nav: [index.md, readme.md]\n")
    built = build("--config-file", str(tmp_path / "mkdocs.yml"))
    assert built.returncode == 1
    assert "'nowhere.md'" in built.stderr
    assert "'#nowhere'" in built.stderr


def test_nothing_is_loaded_from_elsewhere(site):
    for path, page in site.items():
        for url in page.loads:
            assert "//" not in url, f"{path.name} loads {url}"
            file = url.partition("#")[0].partition("?")[0]
            # 404.html is for servers, at whose root the site stands.
            assert file.startswith("/") or not file or (path.parent / file).is_file(), (
                f"{path.name} loads {url}, which is not there"
            )


@pytest.mark.parametrize(("question", "page", "answer"), QUESTIONS)
def test_a_newcomers_question_is_answered(site, question, page, answer):
    words = next(" ".join("".join(each.words).split()) for path, each in site.items() if path.stem == page)
    assert re.search(answer, words), f"{question} {page}.md should say"


def test_an_example_in_a_page_is_the_file_that_is_run():
    text = (REPOSITORY / "docs" / "extend.md").read_text(encoding="utf-8")
    assert f"```python\n{(REPOSITORY / 'examples/plugins/focal.py').read_text(encoding='utf-8')}```" in text


def test_lists_and_tables_are_what_they_are_on_github(site):
    """Python-Markdown wants an empty line in front of them, GitHub does not."""
    for path, page in site.items():
        for text in page.paragraphs:
            assert not re.search(r"(?m)^\s*([-*] |\d+\. |\|.*\|$|```)", text), f"{path.name}: {text}"
