"""The manual says what the code says: generated parts, errors, settings, public names, the functions of the tour."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import itertools
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from ray.scripts.scripts import cli
from repository import ROOT

import memstore
from memstore import errors
from memstore.cli import main
from memstore.config import Config
from memstore.core.report.problems import KINDS
from memstore.distribution import DISTRIBUTION, OLDEST, VERSION, refused_versions

README_LINES_MAX = 200
DOCS = ROOT / "docs"


def tool(name: str) -> ModuleType:
    """Return a script of docs/, which is no package, as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATE = tool("generate")


def page(name: str) -> str:
    """Return the text of a page of the manual."""
    return (DOCS / name).read_text(encoding="utf-8")


def test_the_readme_is_short() -> None:
    """A newcomer reads it in five minutes; the rest is in docs/."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES_MAX


@pytest.mark.xdist_group("generated")  # they share what `memstore simulate` says of large jobs
@pytest.mark.parametrize("path", [path for path in GENERATE.pages() if "<!-- generated:" in path.read_text()], ids=str)
def test_generated_parts_are_current(path: Path) -> None:
    """After a change of a setting, or of the rooms: `python docs/generate.py`, and commit the page."""
    text = path.read_text(encoding="utf-8")
    assert GENERATE.written(text) == text


@pytest.mark.xdist_group("generated")
@pytest.mark.parametrize("name", GENERATE.PLOTS)
def test_a_plot_is_current_and_its_page_shows_it(name: str) -> None:
    """Drawn from what the commands and the records say now."""
    path = DOCS / name
    assert path.read_text(encoding="utf-8") == GENERATE.PLOTS[name]()
    assert f"]({path.name})" in path.with_suffix(".md").read_text(encoding="utf-8")


def test_every_generated_part_stands_in_one_page() -> None:
    """None is generated for nothing."""
    found = [name for path in GENERATE.pages() for name in GENERATE.PART.findall(path.read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(GENERATE.PARTS)


def test_every_setting_says_what_it_does() -> None:
    """Each field of Config has a comment, which becomes its line in the table."""
    comments = GENERATE.field_comments()
    assert [field.name for field in dataclasses.fields(Config) if len(comments.get(field.name, "")) < 10] == []


def test_every_error_has_a_cause_and_a_remedy() -> None:
    """In the order of errors.py, with what to do about each."""
    tree = ast.parse(Path(errors.__file__).read_text(encoding="utf-8"))
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    sections = re.split(r"^### ", page("operate/troubleshooting.md"), flags=re.MULTILINE)[1:]
    assert [section.split()[0] for section in sections] == defined
    for section in sections:
        cause, remedy = re.findall(r"^- \*\*(?:Cause|Remedy)\.\*\* (.*)$", section, re.MULTILINE)
        assert len(cause) > 20, section
        assert len(remedy) > 10, section


def test_every_public_name_has_its_docstring_on_the_page() -> None:
    """Errors have a page of their own."""
    text = page("reference/api.md")
    own_page = {name for name in memstore.__all__ if name in vars(errors)} | {"errors", "__version__"}
    assert {f"memstore.{name}" for name in memstore.__all__ if name not in own_page} == set(
        re.findall(r"^## (memstore\.\w+)$", text, re.MULTILINE)
    )
    for place in re.findall(r"^::: (\S+)$", text, re.MULTILINE):
        assert is_defined(*split(place)), place


def split(place: str) -> tuple[Path, str]:
    """Return the file and the name in it of a dotted place."""
    parts = place.split(".")
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:end]).with_suffix(".py")
        if path.exists():
            return path, ".".join(parts[end:])
    raise AssertionError(f"{place} is in no file")


@cache
def names_of(path: Path) -> frozenset[str]:
    """Return the functions, classes and methods of a file: "Store", "Store.put", "connect"."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{part.name}"
                for part in node.body
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return frozenset(found)


def is_defined(path: Path, name: str) -> bool:
    """Return whether a file has a function, class or method of this name; "" is the file itself."""
    return not name or name in names_of(path)


def cited(text: str) -> list[tuple[str, str]]:
    """Return the files and functions that a table names: | `client/store.py` | `Store.put` | ..."""
    return re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", text, re.MULTILINE)


def astray(text: str) -> list[str]:
    """Return the functions that a table names and that are not where it says."""
    found = []
    for file, name in cited(text):
        base = ROOT if file.split("/")[0] in ("placement", "recovery") else ROOT / "memstore"
        if not (base / file).is_file() or not is_defined(base / file, name):
            found.append(f"{file} {name}")
    return found


def test_every_function_of_the_tour_is_where_it_says() -> None:
    """A reader who follows the tour finds each one."""
    text = page("internals/source-tour.md")
    assert len(cited(text)) > 50
    assert astray(text) == []
    files = re.findall(r"`((?:\w+/)*\w+\.py)`", text)
    assert [file for file in files if not any((base / file).is_file() for base in (ROOT, ROOT / "memstore"))] == []


def test_a_function_that_is_not_there_is_seen() -> None:
    """One that was renamed, and one whose file moved."""
    there = "| `client/store.py` | `Store.put` | |"
    rows = f"{there}\n| `client/store.py` | `Store.gone` | |\n| `client/gone.py` | `f` | |\n"
    assert astray(rows) == ["client/store.py Store.gone", "client/gone.py f"]


# -- problem kinds ------------------------------------------------------------------------------------
# Each kind of problem is made by a real fault in a test that does its remedy, and has a row in the manual.


#: Kind -> the file below tests/ and the function that breaks something, finds the row, does what it says, sees it go.
PROVED = {
    "host_suspect": "unit/core/report/test_problem_remedies.py::test_a_silent_host_is_suspect_then_dead",
    "host_dead": "unit/core/report/test_problem_remedies.py::test_the_copies_of_a_dead_host_are_rebuilt",
    "host_drains": "unit/core/report/test_training.py::test_a_notice_that_is_over",
    "host_full": "unit/holder/test_full_folder.py::test_a_fact_without_room_waits",
    "holder_nice": "integration/client/test_sharing.py::test_a_holder_comes_forward",
    "over_limit": "unit/arena/test_capacity.py::test_rm_and_a_refused_first_put",
    "host_warning": "unit/holder/test_controller_session.py::test_a_helper_that_was_not_built",
    "descriptors": "unit/arena/test_descriptors.py::test_a_holder_without_descriptors",
    "files_removed": "integration/faults/test_faults_arena.py::test_removed_files_of_a_living_holder",
    "damage_found": "integration/faults/test_faults_arena.py::test_the_scrub_finds_damage_by_itself",
    "launch_waits": "unit/core/attempts/test_controller_attempts.py::test_a_launch_that_gathers",
    "not_whole": "unit/core/report/test_problem_remedies.py::test_a_step_that_is_nowhere_whole",
    "step_retired": "unit/core/report/test_problem_remedies.py::test_a_retired_step_is_lifted_by_verify",
    "few_copies": "unit/core/report/test_problem_remedies.py::test_a_job_with_too_few_hosts",
    "job_ended": "unit/core/report/test_training.py::test_a_job_that_an_exception_ended",
    "ranks_ended": "integration/cli/test_cli_training.py::test_a_killed_rank_stops_training",
    "ranks_unseen": "integration/cli/test_cli_training.py::test_a_killed_rank_stops_training",
    "rank_late": "unit/core/report/test_training.py::test_one_rank_that_puts_nothing",
    "training_quiet": "unit/core/report/test_training.py::test_a_training_that_hangs",
    "nothing_committed": "unit/core/report/test_training.py::test_ranks_that_put_different_steps",
    "steps_skipped": "integration/cli/test_cli_training.py::test_puts_that_come_faster",
    "in_flight": "unit/core/report/test_problem_remedies.py::test_versions_in_flight",
    "replicas_differ": "integration/client/test_shared_shard_processes.py::test_equal_ranks_that_differ",
    "nonfinite": "integration/client/test_history.py::test_a_rank_whose_numbers_are_not_finite",
    "placement": "unit/core/report/test_training.py::test_copies_that_cannot_lie_far_apart",
    "durable_off": "unit/core/report/test_problem_remedies.py::test_a_job_without_durable_storage",
    "durable_failed": "unit/core/report/test_training.py::test_storage_that_fails_and_one_that_is_slow",
    "durable_missing": "unit/core/durable/test_controller_durable.py::test_what_durable_storage_lost",
    "durable_abandoned": "unit/core/report/test_problem_remedies.py::test_writes_that_are_abandoned",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_its_test_and_its_row_in_the_manual(kind: str) -> None:
    """A test that looks for the kind itself, or by a helper of its module that does."""
    page = (ROOT / "docs/operate/troubleshooting.md").read_text(encoding="utf-8")
    assert f"| `{kind}` |" in page
    path, _, begins = PROVED[kind].partition("::")
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    [test] = [node for name, node in functions.items() if name.startswith(begins)]
    called = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)} & functions.keys()
    looks = [test, *(functions[name] for name in called)]
    texts = [node.value for look in looks for node in ast.walk(look) if isinstance(node, ast.Constant)]
    assert kind in texts, f"{PROVED[kind]} does not look for it"


def test_a_kind_that_is_gone_keeps_no_test_here() -> None:
    """The table has the kinds that there are."""
    assert PROVED.keys() == set(KINDS)


# -- distribution -------------------------------------------------------------------------------------
# The name of the distribution: ours alone, and no text tells a user to install another project's package.


# What pip takes for the package of that name: `memstore`, `memstore[extra]`, `memstore==1`, but no path or import name.
INSTALL = re.compile(r"(?:pip install|requirements?:?)[^\n#]*[\s'\"]memstore(?![\w./-])")


def test_the_distribution_is_named_once() -> None:
    """pyproject.toml and the code agree, and the name is not the one that another project has on PyPI."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^name = "(.*)"$', text, re.MULTILINE) == [DISTRIBUTION]
    assert DISTRIBUTION != "memstore"


def test_the_version_stands_once() -> None:
    """The build takes it from the code; the changelog has it, and what deploys names it."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'version = { attr = "memstore.distribution.VERSION" }' in project
    assert memstore.__version__ == VERSION
    assert f"\n## [{VERSION}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for path in ("deploy/Dockerfile", "deploy/kubernetes/overlays/example/kustomization.yaml"):
        assert VERSION in (ROOT / path).read_text(encoding="utf-8"), path


def test_versions_that_are_too_old_are_refused_with_what_works() -> None:
    """Those that pyproject.toml asks for, whatever stands behind them; what is absent may be absent."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={OLDEST["torch"]}"' in project
    assert f'"ray[default]>={OLDEST["ray"]}"' in project
    for well in (
        {"torch": "2.6.0+cu124", "ray": "2.49.0"},
        {"torch": "2.13.0", "ray": None},
        {},
        {"ray": "3.0.0.dev0"},
    ):
        assert refused_versions(well) == ""
    assert "works with torch 2.6 or newer, and 2.5.1 is installed: pip install 'torch>=2.6'" in refused_versions(
        {"torch": "2.5.1", "ray": "2.60.0"}
    )
    assert "ray 2.49 or newer, and 2.9.3 is installed" in refused_versions({"ray": "2.9.3"})


def test_no_text_installs_the_other_project() -> None:
    """Docs, errors, the cluster file and CI never install `memstore` by name."""
    assert INSTALL.search("pip install 'memstore[objects]'")
    assert INSTALL.search("pip install --quiet torch==2.13.0 memstore")
    assert not INSTALL.search("pip install ~/memstore-source")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {Path(name) for name in listed.split("\0") if name and not name.endswith(".json")}
    found = []
    for name in sorted(names - {Path("tests/house/test_docs.py")}):
        lines = (ROOT / name).read_text(encoding="utf-8", errors="replace").splitlines()
        found += [f"{name}:{number}: {line}" for number, line in enumerate(lines, 1) if INSTALL.search(line)]
    assert not found


# -- code ---------------------------------------------------------------------------------------------
# What a reader pastes works: Python blocks pass the type checker, commands are parsed by what they start.
#
# The loops of README and quickstart are run as well (tests/unit/client/test_launch.py), and so are the commands of the
# examples (test_examples*.py). Lines of `memstore` verbs: tests/integration/cli/test_remedies.py.


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# What a block may use without making it: a training script's own names.
PRELUDE = """\
# mypy: allow-untyped-calls
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import memstore

state: dict[str, Any] = {}
store: memstore.Store
model: torch.nn.Module
ddp_model: DistributedDataParallel
optimizer: torch.optim.Optimizer
gradients: torch.Tensor
batches: Iterator[torch.Tensor]
loader: Any
dataset: Any
step: int
first: int
STEPS: int
fsdp_rank: int
fsdp_size: int


def train_step(*arguments: Any) -> None: ...


def train(config: dict[str, int]) -> None: ...


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return batch
"""
COLUMNS = 80
OWN_PARSERS = ("memstore.testing.simulator.__main__", "memstore.testing.nemesis.__main__")


def blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a page in a language; "" for those that name none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [body for name, body in found if name == language]


def as_module(pages: list[Path]) -> str:
    """Return every Python block as a function of its own, behind the prelude."""
    parts = [PRELUDE]
    for page in pages:
        for number, block in enumerate(blocks(page.read_text(encoding="utf-8"), "python")):
            name = re.sub(r"\W", "_", f"{page.relative_to(ROOT)}_{number}")
            parts.append(f"def {name}() -> None:\n{textwrap.indent(block, '    ')}")
    return "\n\n".join(parts)


def checked(source: str, folder: Path) -> str:
    """Return what mypy says of a source; "" if nothing.

    With the options of `make types`, so that it knows from its cache what the source imports.
    """
    (folder / "blocks.py").write_text(source)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(folder / "blocks.py")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert run.stderr == ""
    return run.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_python_blocks_pass_the_type_checker(tmp_path: Path) -> None:
    """Names, arguments and results are those of the library; a block that does not fit is seen."""
    source = as_module(PAGES)
    assert source.count("def README_md_") == 1
    assert source.count("\ndef ") > 12
    planted = 'def planted() -> None:\n    memstore.connect("job", replica=2)\n'
    found = [line.partition(": ")[2] for line in checked(f"{source}\n\n{planted}", tmp_path).splitlines()]
    assert len(found) == 2, found
    assert 'Unexpected keyword argument "replica"' in found[0]
    assert found[1].startswith("note: ")


def commands(word: str = "") -> list[tuple[str, str]]:
    """Return (page, command) of every line of a code block that begins with `word`, behind `$` and variables."""
    lines = [
        (
            str(page.relative_to(ROOT)),
            re.sub(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*", "", line.partition("  ")[0].partition(" #")[0]),
        )
        for page in PAGES
        for block in blocks(page.read_text(encoding="utf-8"), "")
        for line in block.splitlines()
    ]
    return [(page, line) for page, line in lines if line.startswith(word)]


def parse_python(words: list[str], folder: Path) -> None:
    """Run `-c`; of a script of ours read its options; what the reader writes himself, train.py, is left alone."""
    if words[0] == "-c":
        subprocess.run([sys.executable, *words], cwd=folder, timeout=120, check=True)
    elif words[0].startswith("examples/"):
        source = (ROOT / words[0]).read_text(encoding="utf-8")
        assert [option for option in words[1:] if option.startswith("--") and f'"{option}"' not in source] == []
    else:
        assert (
            words[:2] in (["-m", "memstore.testing.simulator"], ["-m", "memstore.testing.nemesis"])
            or words[0] == "train.py"
        )


def parse_torchrun(words: list[str], folder: Path) -> None:
    """Its own options, then a script."""
    parsed = importlib.import_module("torch.distributed.run").get_args_parser().parse_args(words)
    parse_python([parsed.training_script, *parsed.training_script_args], folder)


def parse_ray(words: list[str], _folder: Path) -> None:
    """As Ray's own command line reads it."""
    with cli.make_context("ray", words, resilient_parsing=False) as context:
        name, command, rest = cli.resolve_command(context, words)
        assert command is not None
        command.make_context(name, rest, parent=context)


def parse_pip(words: list[str], _folder: Path) -> None:
    """Extras are those of the distribution, files are there."""
    assert words[:1] == ["install"]
    for extra in re.findall(r"\[(\w+)\]", " ".join(words)):
        assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE), extra
    for option, file in itertools.pairwise(words):
        assert option != "-c" or (ROOT / file).exists(), file


def run_in_shell(words: list[str], folder: Path) -> None:
    """Make a key as the page says."""
    subprocess.run(["bash", "-c", " ".join(["head", *words])], cwd=folder, timeout=60, check=True)
    assert (folder / "key").stat().st_size == 32


def parse_memstore(words: list[str]) -> None:
    """As the command line reads a verb and its options."""
    main.commands[words[0]].make_context(words[0], words[1:])


def parse_kubectl(words: list[str], _folder: Path) -> None:
    """Files are there, and what runs in a pod is a command of ours."""
    for option, file in itertools.pairwise(words):
        assert option not in ("-k", "-f") or (ROOT / file).exists(), file
    if "--" in words:
        program, *rest = words[words.index("--") + 1 :]
        assert program == "memstore"
        parse_memstore(rest)


def parse_docker(words: list[str], folder: Path) -> None:
    """The Dockerfile is there, a variable is one of the manual, and what runs in an image is a command of Ray."""
    for option, value in itertools.pairwise(words):
        assert option != "-f" or (ROOT / value).exists(), value
        assert option != "-e" or f"| `{value.partition('=')[0]}` |" in page("reference/config.md"), value
    if words[0] == "run":
        program, *rest = words[words.index("IMAGE") + 1 :]
        assert program == "ray"
        parse_ray(rest, folder)


PARSERS: dict[str, Callable[[list[str], Path], None]] = {
    "python": parse_python,
    "torchrun": parse_torchrun,
    "ray": parse_ray,
    "pip": parse_pip,
    "head": run_in_shell,
    "kubectl": parse_kubectl,
    "docker": parse_docker,
}
PROGRAM = re.compile(r"(?:python|torchrun|ray|pip|head|git|docker|kubectl|curl|sudo|apt(?:-get)?|cd|export|prlimit) ")
OTHERS = ("memstore ", "make ")  # tests/integration/cli/test_remedies.py; below


@pytest.mark.parametrize(("page", "command"), [(page, line) for page, line in commands() if PROGRAM.match(line)])
def test_every_command_of_a_page_is_one(page: str, command: str, tmp_path: Path) -> None:
    """Each is run, or read by the program that it starts; a program without a parser here is refused."""
    program, _, rest = command.partition(" & ")[0].partition(" ")
    assert program in PARSERS, f"{page} starts {program}: give it a parser here"
    words = rest.split() if program == "head" else shlex.split(rest)
    PARSERS[program](words, tmp_path)


def too_long(block: str) -> list[str]:
    """Return the lines that a window of 1,280 pixels cuts; drawings and output may scroll."""
    return [line for line in block.splitlines() if len(line) > COLUMNS]


def test_code_fits_its_column() -> None:
    """The half that is cut is the comment, which explains."""
    assert too_long("x" * COLUMNS) == []
    assert too_long("x" * COLUMNS + "y") != []
    found = []
    for page in PAGES[1:]:  # the README is read where it is not cut
        text = page.read_text(encoding="utf-8")
        typed = [block for block in blocks(text, "") if PROGRAM.match(block) or block.startswith(("#", "$ ", *OTHERS))]
        shown = [line for block in typed for line in block.splitlines() if line.startswith(("#", *OTHERS))]
        found += [(page.name, line) for block in blocks(text, "python") for line in too_long(block)]
        found += [(page.name, line) for line in too_long("\n".join(shown))]
    assert found == []


@pytest.mark.parametrize(("page", "command"), commands("python -m memstore.testing"))
def test_commands_of_the_kit_are_parsed(page: str, command: str) -> None:
    """Each option is one of the module that is started."""
    module, *words = shlex.split(command)[2:]
    name = f"{module}.__main__"
    assert name in OWN_PARSERS, f"{page} starts {module}"
    importlib.import_module(name).parser().parse_args(words)


@pytest.mark.parametrize(("page", "command"), commands("make "))
def test_make_has_the_target(page: str, command: str) -> None:
    """And each variable that is set is one of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    target, *settings = shlex.split(command)[1:]
    assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page}: make {target}"
    for setting in settings:
        assert re.search(rf"^{setting.partition('=')[0]} \?=", makefile, re.MULTILINE), f"{page}: {setting}"
