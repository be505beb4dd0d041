"""What a reader pastes works: Python blocks pass the type checker, commands are parsed by what they start.

The README's first loop is run as well (tests/unit/client/test_launch.py), and so are the commands of the examples
(test_examples*.py). Lines of `memstore` verbs: tests/integration/cli/test_remedies.py.
"""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
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


def commands(word: str) -> list[tuple[str, str]]:
    """Return (page, command) of every line of a code block that begins with `word`."""
    lines = [
        (str(page.relative_to(ROOT)), line.partition("  ")[0].partition(" #")[0])
        for page in PAGES
        for block in blocks(page.read_text(encoding="utf-8"), "")
        for line in block.splitlines()
    ]
    return [(page, line) for page, line in lines if line.startswith(word)]


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
