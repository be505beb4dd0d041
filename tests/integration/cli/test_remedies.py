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
from repository import ROOT

import memstore
from memstore.cli import main
from memstore.config import Config
from memstore.core.wire.calls import DrainHost
from memstore.demo.cli import demo
from memstore.drills.cli import drill
from memstore.errors import ConfigError, IntegrityError, MemstoreError
from memstore.shell.arena.lock import ArenaLock
from memstore.shell.arena.mapping import ArenaMapping
from memstore.shell.identity import rank_host
from memstore.shell.rank.admin_link import Tool
from memstore.testing.clusters.processes import ProcessCluster

COMMAND = re.compile(r"`(memstore [^`]+)`")
ELSEWHERE = {"demo": demo, "drill": drill}  # verbs that the command imports when they run
LINE = re.compile(r"^(?:\$ )?(memstore [a-z][^#\n]*)", re.MULTILINE)  # of a code block
PAGES = (
    "README.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
    "memstore/grafana/alerts.yaml",
    "memstore/grafana/dashboard.json",
)

OTHER = Config(store="two", arena_dir="/mnt/a b")


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
        blocks = "".join(block for block in text.split("```")[1::2] if not block.startswith("text\nOf 30 days"))
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
    for folder in ("ckpt", "ranks"):  # that the guide imports
        (tmp_path / folder).mkdir()
    (tmp_path / "store.json").touch()  # what `memstore status --json` wrote
    words = command.replace(" /", "").split()
    if len(words) == 2 or " / " in command:  # "up / down" names two
        assert {*words[1:]} <= {*main.commands, *ELSEWHERE}, f"{COMMANDS[command]} prints {command!r}"
        return
    try:
        parse(command)
    except click.UsageError as error:
        pytest.fail(f"{COMMANDS[command]} prints {command!r}: {error.format_message()}")


#: Functions of the product that put the store's name into the commands of a text.
NAMING = {"commands", "commands_for", "commands_naming", "_commands"}


def unnamed(tree: ast.AST) -> Iterator[str]:
    """Return the strings that tell to run a command about a store and go through nothing that names it; not docs."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and OTHER.commands(node.value) != node.value:
            above, at = [], node
            while at in parents:
                at = parents[at]
                above.append(at)
            calls = [found.func for found in above if isinstance(found, ast.Call)]
            names = {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls}
            if not isinstance(above[0], ast.Expr) and not names & NAMING:
                yield node.value


def test_a_command_in_an_error_of_the_library_goes_through_what_names_the_store() -> None:
    """But for the command line's own words and what the controller and holders answer, named where it arrives."""
    elsewhere = {ROOT / "memstore/shell/arena/memory_limits.py", ROOT / "memstore/shell/arena/memory_limits.py"}
    for path in sorted({*(ROOT / "memstore").rglob("*.py")} - elsewhere):
        if path.relative_to(ROOT / "memstore").parts[0] not in ("cli", "core"):
            found = list(unnamed(ast.parse(path.read_text(encoding="utf-8"))))
            assert not found, f"{path}: {found}"
    planted = "raise X(f'{a}: run `memstore up`')\nlink.commands('`memstore up`')"
    assert list(unnamed(ast.parse(planted))) == [": run `memstore up`"]


def test_errors_and_problems_of_the_library_name_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller's answers, a ticket, status, and what is said of a folder: each command is run as printed."""
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    with ProcessCluster(tmp_path, {"h1": {}}) as cluster:
        named = f"--store {cluster.config.store}"
        config = cluster.config.with_fields({"replicas": 2, "stall_budget_s": 0.0, "connect_timeout_s": 10.0})
        with memstore.connect("train", rank=0, world_size=1, config=config) as store:
            store.get()
            ticket = store.put(1, {"a": 1}).wait("committed", 20)
            with pytest.raises(TimeoutError, match=f"`memstore status {named}`"):
                ticket.wait("durable", 0.0)
            store.pin(1, "best")
            store.put(2, {"a": 2}).wait("committed", 20)
            with pytest.raises(ConfigError, match=f"`memstore unpin {named} train best`"):
                store.pin(2, "best")
            cluster.ask(DrainHost(host="h1", within_s=60.0))
            remedies = " ".join(row["remedy"] for row in memstore.status(config=config).problems)
            assert f"`memstore drain {named} h1 --cancel`" in remedies
        with pytest.raises(ConfigError, match=f"`memstore down {named}`"):
            ArenaLock.take(cluster.arena("h1"), timeout_s=1.0)
        cluster.kill_holder("h1")
        with (cluster.arena("h1") / "slots").open("r+b") as table:
            table.write(b"damaged!")
        with pytest.raises(IntegrityError) as damaged:
            ArenaMapping.open(cluster.arena("h1"))
        (command,) = re.findall("`memstore (.*)`", str(damaged.value))
        assert CliRunner().invoke(main, shlex.split(command)).exit_code == 0
        assert not cluster.arena("h1").exists()
        for look in (lambda: Tool(cluster.arena("h1")), lambda: rank_host({}, tmp_path / "two", None)):
            with pytest.raises(MemstoreError, match="`memstore up --store"):
                look()


def test_a_printed_command_names_its_store(tmp_path: Path) -> None:
    """Run without --store it would stop or clear the store "default"."""
    assert Config().commands("run `memstore down`") == "run `memstore down`"
    assert OTHER.commands("`memstore down --discard` or `memstore up --arena-bytes SIZE`") == (
        "`memstore down --store two --arena-dir '/mnt/a b' --discard` or "
        "`memstore up --store two --arena-dir '/mnt/a b' --arena-bytes SIZE`"
    )
    once = OTHER.commands(
        "`memstore rm j`; `memstore stores` lists all, memstore commits, and `memstore drill` is about none"
    )
    assert OTHER.commands(once) == once
    shown = CliRunner().invoke(main, ["down", "--leftovers", "--store", "two", "--arena-dir", str(tmp_path)])
    assert "left nothing" in shown.stderr
    (tmp_path / f"memstore-{os.getuid()}" / "two" / "h1").mkdir(parents=True)
    for words in ("down --leftovers", "status", "status --json"):
        shown = CliRunner().invoke(main, [*words.split(), "--store", "two", "--arena-dir", str(tmp_path)])
        assert f"`memstore up --store two --arena-dir {tmp_path}`" in shown.output, words
        assert "`memstore up`" not in shown.output, words
