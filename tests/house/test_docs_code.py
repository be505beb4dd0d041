"""What a reader pastes works: Python blocks pass the type checker, commands are parsed by what they start.

The loops of README and quickstart are run as well (tests/unit/client/test_launch.py), and so are the commands of the
examples (test_examples*.py). Lines of `memstore` verbs: tests/integration/cli/test_remedies.py.
"""

from __future__ import annotations

import importlib
import itertools
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ray.scripts.scripts import cli
from repository import ROOT

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


PARSERS = {"python": parse_python, "torchrun": parse_torchrun, "ray": parse_ray, "pip": parse_pip, "head": run_in_shell}
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
