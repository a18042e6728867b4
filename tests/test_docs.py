"""Every code block of the README and of the pages in docs/ is run, as far as one machine goes.

Blocks of Python run in order, a page at a time, in an empty folder. Of a shell block, every command is given to the
program's own parser; those that train stop when their settings have been accepted, except for those of a few
rounds of the embedded digits, which are quick, at 8 px. A language or a program that is not known here fails.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import inspect
import io
import re
import shutil
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from PIL import Image
from torch import Tensor

from jdfl_lightning import PACS, DigitsDomains, JointModule, LocalUpdate, OfficeCaltech
from jdfl_lightning.algorithms import Algorithm
from jdfl_lightning.cli import main
from jdfl_lightning.config import parse_experiment
from jdfl_lightning.core import messages as crossing
from jdfl_lightning.data.folder import KnownDomains
from jdfl_lightning.federation.members import read_roster
from jdfl_lightning.storage.folder import read_run
from pages import PAGES, ROOT, Block, Command, commands, read

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TRAINING = ("fit", "discover", "diagnose", "suite")
"""Commands that take long: they go as far as the settings."""
FOREIGN = {"flower-superlink": 0, "flower-supernode": 0, "flwr": 2, "ray": 1}
"""Programs of deployments, and how many words of subcommands they have at most: their options are looked up."""
HOOKS = (
    "check_settings",
    "check_run",
    "init_server",
    "init_client",
    "sample",
    "broadcast",
    "local",
    "second",
    "init_models",
    "model_of",
    "upload_form",
    "aggregate",
    "metrics",
    "other_models",
)
SAFE = ("openssl", "printf", "ssh-keygen")
"""Programs that are run, where they are installed: they write small files and nothing else."""


class Accepted(BaseException):
    """Raised where training would begin: the settings have been accepted."""


def few_digits(patch: pytest.MonkeyPatch) -> None:
    """Train on a quarter of the digits: what pages print is compared without its numbers."""
    load = DigitsDomains.load

    def load_few(data: DigitsDomains) -> tuple[Tensor, ...]:
        whole = load(data)
        few = torch.randperm(len(whole[0]), generator=torch.Generator().manual_seed(0))[::4]
        return tuple(found[few] for found in whole)

    patch.setattr(DigitsDomains, "load", load_few)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, for commands that need one."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    tiny = ["--data.size", "8", "--data.num_clients", "4", "--rounds", "1", "--epochs", "1", "--supervision", "base"]
    with pytest.MonkeyPatch.context() as patch:
        few_digits(patch)
        assert main(["fit", *tiny, "--run_dir", str(folder)]) == 0
    return folder


class Page:
    """Does what a page says, in the current folder."""

    def __init__(self, page: Path, finished: Path) -> None:
        self.page, self.finished = page, finished
        self.module = types.ModuleType(f"page_{page.stem}")
        self.last = ""
        """The last block of code, and what the last command printed."""
        self.printed = ""

    def run(self, block: Block) -> None:
        """Do one block; every language has its method."""
        handler: Callable[[str], None] | None = getattr(self, f"_{block.kind}", None)
        assert handler, f"no rule for a block of {block.kind or 'no language'!r}"
        handler(block.text)
        if block.kind in ("python", "yaml", "toml"):
            self.last = block.text

    def _python(self, code: str) -> None:
        exec(compile(code, str(self.page), "exec"), vars(self.module))

    def _pycon(self, session: str) -> None:
        test = doctest.DocTestParser().get_doctest(session, vars(self.module), self.page.name, None, 0)
        said = io.StringIO()
        failed, tried = doctest.DocTestRunner().run(test, out=said.write, clear_globs=False)
        vars(self.module).update(test.globs)
        assert tried
        assert not failed, said.getvalue()

    def _saved(self, name: str) -> None:
        Path(name).write_text(self.last)

    def _yaml(self, text: str) -> None:
        """Settings are taken by the parser, those of a module by Lightning's; what a page has saved can be named."""
        Path("block.yaml").write_text(text)
        if "model" in (settings := yaml.safe_load(text)) and "rounds" not in settings:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a command line that is none
                model = LightningCLI(JointModule, args=["--config", "block.yaml"], run=False).model
            assert model.head.out_features == model.head.num_classes * model.targets.num_domains
        else:
            parse_experiment("fit", ["--config", "block.yaml"])

    def _json(self, text: str) -> None:
        """The sites of a federation."""
        Path("block.json").write_text(text)
        assert read_roster("block.json")

    def _bibtex(self, text: str) -> None:
        """The paper, as CITATION.cff has it."""
        paper = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
        fields = dict(re.findall(r"(\w+)\s*= \{(.*)\}", text))
        authors = " and ".join(f"{one['family-names']}, {one['given-names']}" for one in paper["authors"])
        assert fields == {"title": paper["title"], "author": authors}

    def _toml(self, text: str) -> None:
        assert tomllib.loads(text)

    def _text(self, text: str) -> None:
        """Drawings and signatures are looked at elsewhere; what a command printed has the same words, not numbers."""
        if self.printed:
            shape = _without_numbers(self.printed)
            for line in text.splitlines():
                assert _without_numbers(line) in shape, f"{line!r} is not in:\n{self.printed}"

    def _inline(self, text: str) -> None:
        """Commands in the middle of a sentence."""
        if text.startswith(("jdfl-lightning ", "python ", "pip ", "make ", "flwr ", "ray ")) and "COMMAND" not in text:
            self._sh(text.replace("\n", " "))

    def _sh(self, script: str) -> None:
        for command in commands(script):
            for name, value in command.variables.items():
                assert name == name.upper()
                assert not (name == "PYTHONPATH" and value != ".")
            if command.words:
                program, *words = command.words
                if program in FOREIGN:
                    check_options(program, words)
                    continue
                if program in SAFE:
                    run_program(command)
                    continue
                handler: Callable[[list[str]], None] | None = getattr(self, f"_do_{program.replace('-', '_')}", None)
                assert handler, f"no rule for the program {program!r}"
                handler(words)

    def _do_jdfl_lightning(self, words: list[str]) -> None:
        words = list(self._stand_ins(words))
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                with contextlib.nullcontext() if is_quick(words) else stopped_before_training():
                    small = is_quick(words) and words[0] in TRAINING and not {"--data.size", "--resume"} & set(words)
                    code = main([*words, "--data.size", "8"] if small else words)
            except Accepted:
                code = 0
            except SystemExit as left:  # --help, --print_config
                code = int(left.code or 0)
        assert code == 0, (words, said.getvalue())
        self.printed = said.getvalue()

    def _stand_ins(self, words: list[str]) -> Iterator[str]:
        """Replace what a reader has and a test has not: images, and folders that earlier commands would have left."""
        for before, word in zip(["", *words], words, strict=False):
            if word == "IMAGES...":
                Image.new("RGB", (8, 8)).save("image.png")
                yield "image.png"
                continue
            if before in ("--run", "--resume") or (words[0] == "report" and word in ("runs", "suite")):
                folder = Path(word) / "RUN" if words[0] == "report" else Path(word)
                if word != "auto" and not Path(word).exists():
                    shutil.copytree(self.finished, folder)
            yield word

    def _do_python(self, words: list[str]) -> None:
        """Scripts of the repository, which take minutes: the file is there and knows the options."""
        script = ROOT / words[0]
        own = words[1 : words.index("--")] if "--" in words else words[1:]
        assert script.is_file(), script
        known = set(re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", script.read_text()))
        assert {word for word in own if word.startswith("--")} <= known
        if "--" in words:  # what follows goes to fit
            parse_experiment("fit", words[words.index("--") + 1 :])

    def _do_pytest(self, words: list[str]) -> None:
        assert all((ROOT / word).is_file() for word in words)

    def _do_make(self, words: list[str]) -> None:
        assert all(re.search(rf"^{word}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for word in words)

    def _do_pip(self, words: list[str]) -> None:
        """Only this package, with extras that it has, and what its lock file lists."""
        assert words[0] == "install"
        for before, word in pairwise(words):
            if before == "-r":
                assert (ROOT / word).is_file(), word
            if before == "-r" or word in ("-r", "--require-hashes", "--no-deps"):
                continue
            found = re.fullmatch(r"(?:\.|jdfl-lightning)(?:\[([\w,]+)\])?", word)
            assert found, word
            assert set((found[1] or "test").split(",")) <= set(PROJECT["project"]["optional-dependencies"])

    def _do_export(self, words: list[str]) -> None:
        assert all(re.fullmatch(r"[A-Z][A-Z0-9_]*=\S*", word) for word in words)


def is_quick(words: list[str]) -> bool:
    """Whether a command is done as it stands: it does not train, or at most five rounds of the embedded digits."""
    if words[0] not in TRAINING:
        return True
    rounds = int(words[words.index("--rounds") + 1]) if "--rounds" in words else 25
    return words[0] == "fit" and rounds <= 5 and not {"--config", "--data", "--data.root"} & set(words)


def _without_numbers(text: str) -> str:
    return re.sub(r"[\d.:]+(?:,\d{3})*", "#", re.sub(r"[ \t]+", " ", text))


def run_program(command: Command) -> None:
    """Run a command as it stands, where the program is installed."""
    if shutil.which(command.words[0]):
        done = subprocess.run(command.words, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        if command.output:
            Path(command.output).write_text(done.stdout)


@cache
def known_options(program: str, *subcommands: str) -> frozenset[str]:
    """Return the options that a program's help names."""
    if program != "ray" and sys.version_info < (3, 11):
        pytest.skip("flwr needs Python 3.11")
    environment = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", "FLWR_TELEMETRY_ENABLED": "0"}
    environment |= {"FLWR_HOME": str(Path.cwd() / "flwr"), "FLWR_DISABLE_UPDATE_CHECK": "1"}
    arguments = [program, *subcommands, "--help"]
    (script,) = entry_points(group="console_scripts", name=program)
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        patch.setattr(sys, "argv", arguments)
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as done:
            script.load()()
    assert not done.value.code, (arguments, said.getvalue())
    return frozenset(re.findall(r"(?<![\w-])--[a-z][\w-]*", said.getvalue()))


def check_options(program: str, words: list[str]) -> None:
    """Look up the options of a command that needs other machines."""
    subcommands = []
    for word in words[: FOREIGN[program]]:
        if not re.fullmatch(r"[a-z][a-z-]*", word):
            break
        subcommands.append(word)
    known = known_options(program, *subcommands)
    for before, word in zip(["", *words], words, strict=False):
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"{program} {' '.join(subcommands)} has no {word}"
        elif before in ("--run-config", "--node-config"):
            from flwr.common.config import parse_config_args

            names = set(parse_config_args([word]))
            if before == "--run-config":
                app = tomllib.loads((ROOT / "examples" / "flower_app" / "pyproject.toml").read_text())
                assert names <= set(app["tool"]["flwr"]["app"]["config"])
            else:
                page = (ROOT / "docs" / "flower.md").read_text()
                assert all(f"| `{name}` |" in page for name in names), f"{word}: not in the table"


@contextlib.contextmanager
def stopped_before_training() -> Iterator[None]:
    """Stop a command when its settings are known to be right."""

    def stop(*_: Any, **__: Any) -> NoReturn:
        raise Accepted

    suite = importlib.import_module("jdfl_lightning.studies.suite")  # before anything that it imports is replaced
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (("server.run", "fit"), ("server.run", "discover"), ("studies.diagnose", "diagnose")):
            patch.setattr(importlib.import_module(f"jdfl_lightning.{module}"), name, stop)
        patch.setattr(suite, "run_suite", stop)
        yield


def _runs(page: Path) -> bool:
    """Whether a page has a program, as a notebook has."""
    return any(block.kind == "python" for block in read(page))


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] * _runs(page), id=str(page.relative_to(ROOT))) for page in PAGES],
)
def test_page(page: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    few_digits(monkeypatch)
    for name in ("configs", "examples"):
        Path(name).symlink_to(ROOT / name)
    doing = Page(page, finished)
    monkeypatch.setitem(sys.modules, doing.module.__name__, doing.module)
    before = set(sys.modules)
    for block in read(page):
        try:
            doing.run(block)
        except Exception as error:
            raise AssertionError(f"{page.relative_to(ROOT)}, line {block.line}: {error}") from error
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(Path.cwd())):
            del sys.modules[name]  # what the page has saved
    assert page.name != "joint_head.md" or "E 5 5" in capsys.readouterr().out  # progress=print


@pytest.mark.parametrize(
    "block",
    [
        Block("", "indented", 1),
        Block("javascript", "1", 1),
        Block("python", "assert False", 1),
        Block("pycon", ">>> 1\n2\n", 1),
        Block("yaml", "rouns: 3", 1),
        Block("yaml", "- rounds", 1),
        Block("toml", "a = ", 1),
        Block("sh", "rm file", 1),
        Block("sh", "cat file | sh", 1),
        Block("sh", "jdfl-lightning fit --rouns 3", 1),
        Block("sh", "jdfl-lightning fit --config pacs_d", 1),
        Block("sh", "jdfl-lightning fit --algorithm SCAFFOLD --algorithm.mu 1", 1),
        Block("sh", "jdfl-lightning suite --algorithms FedAvg,FedNothing", 1),
        Block("sh", "jdfl-lightning report runs --goal 0.7", 1),
        Block("sh", "python benchmarks/nothing.py", 1),
        Block("sh", "python benchmarks/digits_table.py --sedes 0", 1),
        Block("sh", "python benchmarks/digits_table.py --seeds 0 -- --rouns 3", 1),
        Block("sh", "pip install '.[nothing]'", 1),
        Block("sh", "pip install something-else", 1),
        Block("sh", "pip install -r nothing.lock", 1),
        Block("sh", "make nothing", 1),
        Block("sh", "pytest tests/test_nothing.py", 1),
        Block("sh", "flower-superlink --insecur", 1),
        Block("sh", "flwr run examples/flower_app here --run-config 'rouns=50'", 1),
        Block("sh", "ray start --hed", 1),
    ],
    ids=lambda block: block.text,
)
def test_a_wrong_block_is_found(block: Block, finished: Path) -> None:
    with pytest.raises((Exception, pytest.fail.Exception)):
        Page(ROOT / "README.md", finished).run(block)


def test_readme_links_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        file, _, anchor = target.partition("#")
        assert (ROOT / file).exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (ROOT / file).read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}, target


@pytest.mark.slow
def test_options_in_sentences_exist() -> None:
    """Options that a page names in passing, such as `--clustering.fraction 0.3`, are options of some command."""
    generate = load_generator()
    known = set(re.findall(r"--[a-z][\w.]*", generate.commands()))
    known |= {f"--{name}" for name in re.findall(r"^\| `([\w.]+)` \|", generate.settings(), re.MULTILINE)}
    known |= known_options("flower-superlink") | known_options("flower-supernode") | known_options("flwr", "run")
    for page in PAGES:
        for block in read(page):
            if block.kind == "inline" and block.text.startswith("--"):
                option = re.split(r"[\s=]", block.text)[0]
                assert option in known, f"{page.relative_to(ROOT)}, line {block.line}: {block.text}"


def load_generator() -> types.ModuleType:
    """Return docs/generate.py, which is no part of a package."""
    found = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert found
    assert found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("data", [PACS, OfficeCaltech])
def test_data_sets_are_told_as_they_are(data: type[KnownDomains]) -> None:
    text = " ".join((ROOT / "docs" / "datasets.md").read_text().split())
    sizes = {name: sum(counts) for name, counts in data.counts.items()}
    domains = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
    assert f"| `{data.__name__}` | {sum(sizes.values()):,} | {domains} | {len(data.class_names)} |" in text
    assert str(data.terms) in text


def test_digits_are_told_as_they_are() -> None:
    data = DigitsDomains(size=8)
    data.setup()
    sizes = ", ".join(f"{n} {c}" for n, c in zip(data.domain_names, data.domains.bincount().tolist(), strict=True))
    assert f"| `DigitsDomains` | {len(data.images):,} | {sizes} | 10 |" in (ROOT / "docs" / "datasets.md").read_text()


def test_signatures_of_the_architecture_are_the_codes() -> None:
    blocks = [block.text for block in read(ROOT / "docs" / "architecture.md") if block.kind == "text"]
    text = re.sub(r"\s+", " ", re.sub(r"#.*", "", "\n".join(blocks)))
    for message in (crossing.FitTask, crossing.FitResult, crossing.FitFailure, crossing.RoundContext):
        (told,) = re.findall(rf"{message.__name__}\(([^)]*)\)", text)
        assert [name.partition(":")[0] for name in told.split(", ")] == list(inspect.signature(message).parameters)
    for half, names in ((LocalUpdate, ("begin", "correct", "loss", "report")), (Algorithm, HOOKS)):
        for name in names:
            (told,) = re.findall(rf"\b{name}\(([^)]*)\)", text)
            assert told.split(", ") == list(inspect.signature(getattr(half, name)).parameters)[1:]


def test_every_hook_is_on_the_page_about_writing_an_algorithm() -> None:
    text = (ROOT / "docs" / "own_algorithm.md").read_text()
    assert all(f"`Algorithm.{name}`" in text for name in HOOKS if name != "other_models")
    assert all(f"`LocalUpdate.{name}`" in text for name in ("begin", "correct", "loss", "report"))


def test_own_algorithm_of_the_docs_runs_from_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [block.text for block in read(ROOT / "docs" / "algorithms.md") if block.kind == "python"]
    assert len(block.splitlines()) < 30
    (tmp_path / "mine.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = (
        "algorithm:\n  class_path: mine.FedAvgM\n  init_args:\n    beta: 0.5\nrounds: 3\nepochs: 1\nsupervision: base\n"
    )
    Path("mine.yaml").write_text(config)
    arguments = ["--config", "mine.yaml", "--data.size", "8", "--data.num_clients", "4", "--run_dir", "run"]
    assert main(["fit", *arguments]) == 0
    run = read_run(Path("run"))
    assert run.config["algorithm"] == {
        "class_path": "mine.FedAvgM",
        "init_args": {"weighting": "samples", "beta": 0.5},
    }
    assert [row["norm/server/m"] > 0 for row in run.rows] == [True] * 3
