"""The options every verb has, and the way to the store they name (R4, R5)."""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from memstore.cli.output import DATA_STREAM, STORE_CONFIG, say
from memstore.config import ARENA_VARIABLE, WHOLE_LIMIT, Config, check_name, check_seconds, check_whole
from memstore.core.report.problems import with_commands
from memstore.core.wire.calls import AskStatus, AskSteps
from memstore.core.wire.codec import Request, tag_of
from memstore.core.wire.replies import Status
from memstore.errors import ConfigError, MemstoreError, PeerTimeout, PeerUnreachable
from memstore.shell.on_ray.reach import REACH_S

R = TypeVar("R")
ASK_S = 10.0
_DEBUG, _JSON = "memstore.debug", "memstore.json"


@dataclass(frozen=True)
class Where:
    """Which store to ask, and through what: a holder of this machine, or a Ray cluster if one is named."""

    config: Config
    address: str | None = None

    def ask(self, request: Request[R], timeout_s: float = ASK_S) -> R:
        """Ask the controller.

        Raises:
            PeerUnreachable, PeerTimeout: no holder or no controller answers; says what to run.
        """
        if self.address is not None:
            join_ray_for_verb(self.address)
        try:
            if self.address is not None:
                from memstore.admin.cluster import ask

                return ask(request, config=self.config, timeout_s=timeout_s)
            from memstore.shell.rank.admin_link import any_tool

            with any_tool(self.config) as tool:
                return tool.ask(request, timeout_s)
        except PeerTimeout as error:
            verb = tag_of(request)
            raise PeerTimeout(
                f"the controller of store {self.config.store!r} did not answer {verb!r} within {timeout_s:g} s, though "
                "a holder does: it is down, or still rebuilding. Ray restarts it by itself; if it stays away, "
                "run `memstore up`. What is stored is not touched by this: `memstore status --offline` shows it",
                operation=verb,
                waited_s=timeout_s,
                limit_s=timeout_s,
            ) from error
        except PeerUnreachable as error:
            if self.address is not None:
                raise
            from memstore.admin.stores import others_where_none_is
            from memstore.shell.rank.admin_link import host_folders

            others = others_where_none_is(self.config)
            rest = "; without Ray: `memstore status --offline`" if host_folders(self.config) else ""
            raise PeerUnreachable(f"{error}, or name its Ray cluster with --address{rest}{others}") from error

    def status(self, job: str | None = None) -> Status:
        """Return the controller's status; the commands that it advises name the store.

        Raises:
            ConfigError: the store does not know `job`; says the nearest names, and which other stores have it.
        """
        found = self.ask(AskStatus())
        known = [row.job for row in found.jobs]
        if job is not None and job not in known:
            raise _unknown("job", job, known, "`memstore ls` lists its jobs", self._elsewhere(job))
        return with_commands(found, self.config)

    def named_step(self, job: str, step: int | str | None, attempt: int | None) -> tuple[int | None, int | None]:
        """Return the step and attempt of a STEP that may be a pin's name; of others as they are given."""
        if not isinstance(step, str):
            return step, attempt
        pins = self.ask(AskSteps(job=job)).pins
        if step not in pins:
            raise _unknown("pin", step, list(pins), f"`memstore ls {job}` lists its steps and pins", "")
        return pins[step].step, pins[step].attempt

    def _elsewhere(self, job: str) -> str:
        """Return which other stores have a job: those of this machine, else those of the Ray cluster; "" if none."""
        from memstore.admin.stores import having, shown_in

        found = having(self.config, job)
        if found or self.address is None:
            return found
        from memstore.admin.cluster import stores_having

        names = stores_having(job, self.config)
        return shown_in(self.config, job, names, "of the Ray cluster", f" --address {self.address}")


class WholeNumber(click.ParamType):  # type: ignore[type-arg]  # older click has no argument there
    """The type of an option that is a step, a rank or an attempt, checked as the library does."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read a whole number."""
        with contextlib.suppress(ValueError):
            value = int(value)
        try:
            return check_whole((param and param.name) or "value", value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class Seconds(click.ParamType):  # type: ignore[type-arg]
    """The type of an option that is a time; infinite is as long as the library waits for anything."""

    name = "float"

    def __init__(self, least_s: float = 0.0) -> None:
        self.least_s = least_s

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read a time in seconds."""
        with contextlib.suppress(ValueError):
            value = float(value)
        if isinstance(value, float) and value < self.least_s:
            self.fail(f"{value:g} s is too short: use {self.least_s:g} s or more", param, ctx)
        try:
            return check_seconds((param and param.name) or "value", value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


def join_ray_for_verb(address: str | None, limit_s: float = REACH_S) -> None:
    """Connect this process to a Ray cluster that runs until the verb ends; never start one, it would end with the verb.

    Ray prints on stdout what happens to the cluster meanwhile, such as the loss of a node: this goes to stderr, and
    only the verb's data to stdout.
    """
    root = click.get_current_context().find_root()
    if DATA_STREAM not in root.meta:
        stdout = sys.stdout
        root.with_resource(_joined_ray(address, limit_s))
        root.meta[DATA_STREAM] = stdout


@contextlib.contextmanager
def _joined_ray(address: str | None, limit_s: float) -> Iterator[None]:
    import ray

    from memstore.admin.cluster import join_ray

    with contextlib.redirect_stdout(sys.stderr):
        if ray.is_initialized():
            yield
            return
        join_ray(address, may_create=False, limit_s=limit_s, say=say, logging_level=logging.ERROR)
        try:
            yield
        finally:
            ray.shutdown()


def step_or_pin(ctx: click.Context, param: click.Parameter, text: str) -> int | str | None:
    """Read the argument STEP as `step_or_latest` does, or as a pin's name."""
    with contextlib.suppress(ConfigError):
        if text != "latest" and not (text.isascii() and text.isdigit()):
            return check_name("pin", text)
    return step_or_latest(ctx, param, text)


def step_or_latest(_ctx: click.Context, _param: click.Parameter, text: str) -> int | None:
    """Read the argument STEP: a number, or None for "latest", which is chosen where the steps are known."""
    if text == "latest":
        return None
    if not (text.isascii() and text.isdigit()):
        raise click.UsageError(f"STEP {text!r} is neither a number nor latest")
    if int(text) >= WHOLE_LIMIT:
        raise click.UsageError(f"STEP {text} is out of range: steps are numbered 0 to 2**61 - 1")
    return int(text)


def check_host(status: Status, name: str) -> str:
    """Return the host of this id, or the only one of this hostname; else raise with the ids it knows.

    An id without a label is the hostname and 8 characters of the boot id (R1), which is hard to type.
    """
    known = [row.host for row in status.hosts]
    of_name = [host for host in known if re.fullmatch(re.escape(name) + "-[0-9a-f]{8}", host)]
    if name not in known and len(of_name) == 1:
        return of_name[0]
    if name not in known:
        raise _unknown("host", name, known, "`memstore status` lists its hosts")
    return name


def _unknown(what: str, name: str, known: list[str], remedy: str, elsewhere: str = "") -> ConfigError:
    """Return the error for a name that the store does not know, with the nearest that it does."""
    near = difflib.get_close_matches(name, known, n=3)
    listed = near or sorted(known)[:10]
    more = f" and {len(known) - 10} more" if not near and len(known) > 10 else ""
    have = f"it has {', '.join(listed)}{more}" if known else "it has none"
    hint = f"did you mean {' or '.join(near)}?" if near else f"{have};"
    more = f"; {elsewhere}" if elsewhere else ""
    return ConfigError(f"the store has no {what} {name!r}: {hint} {remedy}{more}", field=what, value=name)


def is_debug(ctx: click.Context) -> bool:
    """Return whether --debug was given to the verb."""
    return bool(ctx.find_root().meta.get(_DEBUG))


def is_json(ctx: click.Context) -> bool:
    """Return whether --json was given to the verb."""
    return bool(ctx.find_root().meta.get(_JSON))


def _set_json(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    ctx.find_root().meta[_JSON] = value
    return value


def json_option(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Add --json; the verb gets `as_json`, and an error of it is a JSON document as well."""
    return click.option(
        "--json", "as_json", is_flag=True, is_eager=True, callback=_set_json, help="One JSON document on stdout."
    )(verb)


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.find_root().meta[_DEBUG] = value


def config_or_usage(**fields: Any) -> Config:
    """Return a Config; a value it refuses is wrong usage (exit code 2)."""
    try:
        return Config(**fields)
    except MemstoreError as error:
        raise click.UsageError(str(error)) from error


def store_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Add --store, --arena-dir, --json and --debug; the verb gets `config` and `as_json`."""

    @click.option("--store", default=Config.store, show_default=True, metavar="NAME", help="Name of the store.")
    @click.option(
        "--arena-dir",
        envvar=ARENA_VARIABLE,
        default=Config.arena_dir,
        show_default=True,
        metavar="DIR",
        help="Memory file system that holds its arenas.",
    )
    @json_option
    @click.option(
        "--debug", is_flag=True, is_eager=True, expose_value=False, callback=_set_debug, help="Tracebacks of errors."
    )
    @functools.wraps(verb)
    def wrapped(*args: Any, store: str, arena_dir: str, **kwargs: Any) -> Any:
        config = config_or_usage(store=store, arena_dir=arena_dir)
        click.get_current_context().find_root().meta[STORE_CONFIG] = config
        return verb(*args, config=config, **kwargs)

    return wrapped


def where_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Add --address, for a machine without a holder, and the store's options; the verb gets `where` and `as_json`."""

    @click.option(
        "--address", metavar="ADDRESS", help="Ray cluster to ask through, when no holder runs on this machine."
    )
    @store_options
    @functools.wraps(verb)
    def wrapped(*args: Any, config: Config, address: str | None, **kwargs: Any) -> Any:
        return verb(*args, where=Where(config, address), **kwargs)

    return wrapped
