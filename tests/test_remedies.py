"""Commands that the product tells a user to run, in errors, status, docs and alert rules: each is one that exists."""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from memstore.cli import main
from memstore.config import Config
from memstore.demo.cli import demo
from memstore.drills.cli import drill

ROOT = Path(__file__).resolve().parent.parent
COMMAND = re.compile(r"`(memstore [^`]+)`")
ELSEWHERE = {"demo": demo, "drill": drill}  # verbs that the command imports when they run
LINE = re.compile(r"^(?:\$ )?(memstore [a-z][^#\n]*)", re.MULTILINE)  # of a code block
PAGES = ("README.md", "THREAT_MODEL.md", "memstore/grafana/alerts.yaml", "memstore/grafana/dashboard.json")


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Return every string of a module as it would be printed, a value that is filled in as 7."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "7" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def printed_commands() -> dict[str, str]:
    """Return each command with the file that prints it first."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "memstore").rglob("*.py")):
        for text in texts_of(ast.parse(path.read_text(encoding="utf-8"))):
            for command in COMMAND.findall(" ".join(text.split())):
                found.setdefault(command, str(path.relative_to(ROOT)))
    for page in PAGES:
        text = re.sub(r"\{\{[^}]*\}\}", "7", (ROOT / page).read_text(encoding="utf-8"))
        blocks = "".join(text.split("```")[1::2])
        for command in (*COMMAND.findall(text), *(line.strip() for line in LINE.findall(blocks))):
            found.setdefault(command, page)
    found.pop("memstore 7")  # a verb that is filled in
    return found


COMMANDS = printed_commands()


def parse(command: str) -> None:
    """Read a command as the command line does, without running it; click.UsageError if it is none."""
    plain = re.sub(r"[\[\]]|\\\|\w+|&&.*|[|>].*", "", command).replace("...", "X")
    plain = re.sub(r"\b(STEP|N)\b", "7", plain)
    words = shlex.split(plain)[1:]
    tool: click.Command = main
    context = main.make_context("memstore", [], resilient_parsing=True)
    while isinstance(tool, click.Group):
        name, found, words = tool.resolve_command(context, words)
        assert found is not None
        tool = ELSEWHERE.get(str(name), found)
        if isinstance(tool, click.Group):
            if not words:
                return  # a group named by itself, such as `memstore drill`
            context = tool.make_context(name, [], resilient_parsing=True)
    tool.make_context(tool.name, words, parent=context)


def test_commands_are_found() -> None:
    """The search sees errors that are put together of pieces, and docs."""
    assert "memstore plan 7" in COMMANDS
    assert len(COMMANDS) > 40
    with pytest.raises(click.UsageError):
        parse("memstore plan 7 --loose h1")


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.split()[1] not in ("-h", "--help")], ids=str)
def test_a_printed_command_can_be_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verb, arguments and options exist. A verb that is only named, without its arguments, exists."""
    monkeypatch.chdir(tmp_path)
    for folder in ("ckpt", "ranks"):  # that the README imports
        (tmp_path / folder).mkdir()
    words = command.replace(" /", "").split()
    if len(words) == 2 or " / " in command:  # "up / down" names two
        assert {*words[1:]} <= {*main.commands, *ELSEWHERE}, f"{COMMANDS[command]} prints {command!r}"
        return
    try:
        parse(command)
    except click.UsageError as error:
        pytest.fail(f"{COMMANDS[command]} prints {command!r}: {error.format_message()}")


def test_a_printed_command_names_its_store(tmp_path: Path) -> None:
    """Run without --store it would stop or clear the store "default"."""
    assert Config().commands("run `memstore down`") == "run `memstore down`"
    other = Config(store="two", arena_dir="/mnt/a b")
    assert other.commands("`memstore down --discard` or memstore up --arena-bytes SIZE") == (
        "`memstore down --store two --arena-dir '/mnt/a b' --discard` or "
        "memstore up --store two --arena-dir '/mnt/a b' --arena-bytes SIZE"
    )
    once = other.commands("`memstore rm j`; `memstore stores` lists all, a memstore commit is no command")
    assert other.commands(once) == once
    shown = CliRunner().invoke(main, ["down", "--leftovers", "--store", "two", "--arena-dir", str(tmp_path)])
    assert "left nothing" in shown.stderr
    (tmp_path / f"memstore-{os.getuid()}" / "two" / "h1").mkdir(parents=True)
    for words in ("down --leftovers", "status", "status --json"):
        shown = CliRunner().invoke(main, [*words.split(), "--store", "two", "--arena-dir", str(tmp_path)])
        assert f"`memstore up --store two --arena-dir {tmp_path}`" in shown.output, words
        assert "`memstore up`" not in shown.output, words
