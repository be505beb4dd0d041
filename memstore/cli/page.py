"""`memstore page`: serves the live page of a store until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import string
from typing import TypeVar

import click

from memstore.cli.options import Where, where_options
from memstore.cli.output import print_json, say
from memstore.core.wire.codec import Request
from memstore.core.wire.replies import Status
from memstore.errors import ConfigError

R = TypeVar("R")
PORT = 8268
TOKEN_VARIABLE = "MEMSTORE_PAGE_TOKEN"
TOKEN_CHARS_MIN = 16


class FromAnyThread:
    """A store, asked in the context of a verb: click keeps that for each thread."""

    def __init__(self, ctx: click.Context, where: Where) -> None:
        self.ctx, self.where = ctx, where

    def ask(self, request: Request[R]) -> R:
        """Ask the controller."""
        with self.ctx.scope(cleanup=False):
            return self.where.ask(request)

    def status(self) -> Status:
        """Ask for its status."""
        with self.ctx.scope(cleanup=False):
            return self.where.status()


@click.command(short_help="A live page in the browser: hosts, exposure, last steps, events, what a loss would cost.")
@click.option("--bind", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Where to listen.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0: one that is free.")
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False),
    help=f"Holds the token that readers must give (or {TOKEN_VARIABLE}); beyond loopback one is made if none is given.",
)
@where_options
@click.pass_context
def page(ctx: click.Context, where: Where, bind: str, port: int, token_file: str | None, as_json: bool) -> None:
    """Serve a page that shows the store as it is, changes nothing, and asks no other host.

    On loopback every user of this machine can read it unless there is a token; elsewhere it demands one. The link that
    is printed has it behind a #, which browsers never send.
    """
    from memstore.shell.page.server import PageServer, is_loopback

    token = given_token(token_file, os.environ.get(TOKEN_VARIABLE, ""))
    if not token and not is_loopback(bind):
        token = secrets.token_urlsafe(24)
    store = FromAnyThread(ctx, where)
    store.status()  # says what to do if there is no store

    def ready(port: int) -> None:
        name = f"[{bind}]" if ":" in bind else bind
        if bind in ("0.0.0.0", "::"):
            name = socket.gethostname()
        url = f"http://{name}:{port}/" + (f"#{token}" if token else "")
        print_json({"url": url, "token": token}) if as_json else click.echo(url)
        if not is_loopback(bind):
            say("not encrypted: who can read this network can read the token; `ssh -L` to a page on loopback is safer")

    asyncio.run(PageServer(store, where.config.store, token).run(bind, port, ready))


def given_token(token_file: str | None, from_environment: str) -> str:
    """Return the token that was given, or ""; one that is short or that others can read is refused."""
    token = from_environment
    if token_file is not None:
        with open(token_file, encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise ConfigError(f"others can read {token_file}: `chmod 600 {token_file}`", field="token_file")
            token = file.read().strip()
    is_given = bool(token) or token_file is not None
    if is_given and (len(token) < TOKEN_CHARS_MIN or not set(token) <= {*string.ascii_letters, *string.digits, *"-_"}):
        raise ConfigError(
            f"the token has {len(token)} characters: give {TOKEN_CHARS_MIN} or more letters, digits, '-' or '_' in "
            f"--token-file or {TOKEN_VARIABLE}, such as `openssl rand -hex 16` prints",
            field="token",
        )
    return token


VERBS = (page,)
