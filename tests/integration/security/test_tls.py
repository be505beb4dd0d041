"""TLS between hosts: strangers to the authority get nothing, bytes on the way are unreadable, training goes on (R4)."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from manifests import composed, pods

from memstore.cli import main
from memstore.config import Config
from memstore.core.wire import frame as wire
from memstore.core.wire.codec import encode_frame
from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import HolderIdentity
from memstore.core.wire.orders import WriteJournal, decode_order
from memstore.core.wire.reports import FactsWritten
from memstore.errors import (
    AuthenticationError,
    ConfigError,
    PeerTimeout,
    PeerUnreachable,
    ProtocolError,
    TransportError,
)
from memstore.shell.controller import FRAMES_A_TURN, Session, SessionEnded, SessionLoop
from memstore.shell.net import auth
from memstore.shell.net.channel import Channel
from memstore.shell.net.listener import Listener, connect_tcp
from memstore.shell.net.tls import Tls
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, together

x509 = pytest.importorskip("cryptography.x509", reason="cryptography makes the certificates of these tests")
SECRET = bytes(range(32))
MARK = b"what no process on the way may read."
HOLDER = HolderIdentity(host="a", incarnation=1)
SIDES = {"secret": SECRET, "store": "s", "identity": HOLDER}
SERVES = {**SIDES, "identity": lambda: HOLDER}


def authority(folder: Path) -> Callable[[str], Config]:
    """Make an authority; return what makes a Config with a certificate of it."""
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder.mkdir()
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"authority {folder.name}")])

    def certificate(name: Any, key: Any, is_ca: bool) -> bytes:
        now = datetime.now(timezone.utc)
        made = x509.CertificateBuilder().subject_name(name).issuer_name(ca_name).public_key(key.public_key())
        made = made.serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(days=1))
        made = made.not_valid_after(now + timedelta(days=1))
        made = made.add_extension(x509.BasicConstraints(is_ca, None), critical=True)
        return made.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    (folder / "ca.pem").write_bytes(certificate(ca_name, ca_key, True))

    def member(name: str) -> Config:
        own = folder / name
        own.mkdir()
        shutil.copy(folder / "ca.pem", own)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        (own / "cert.pem").write_bytes(certificate(subject, key, False))
        (own / "key.pem").touch(mode=0o600)
        (own / "key.pem").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return Config(tls_dir=str(own))

    return member


def changed(config: Config, folder: Path, **files: Path | bytes | None) -> Config:
    """Return a copy of the config with a copy of its folder, in which files are others, or are not there."""
    shutil.copytree(str(config.tls_dir), folder)
    for name, content in files.items():
        path = folder / f"{name}.pem"
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    return replace(config, tls_dir=str(folder))


def file_of(config: Config, name: str) -> Path:
    return Path(str(config.tls_dir)) / name


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    """Two members of the store's authority and one of another."""
    folder = tmp_path_factory.mktemp("tls")
    ours, others = authority(folder / "ours"), authority(folder / "others")
    return {"a": ours("a"), "b": ours("b"), "stranger": others("stranger")}


def tls_of(config: Config) -> Tls:
    tls = Tls.load(config)
    assert tls is not None
    return tls


@pytest.fixture
def aside() -> Iterator[Callable[..., Future[Any]]]:
    """Run a function in another thread; all are waited for at the end."""
    with ThreadPoolExecutor(6) as pool:
        yield pool.submit


class Relay:
    """Stands between two ends and writes down every byte that passes."""

    def __init__(self) -> None:
        self.left, mine = socket.socketpair()
        self.right, theirs = socket.socketpair()
        self.seen = bytearray()
        pairs = ((mine, theirs), (theirs, mine))
        self.threads = [threading.Thread(target=self._pass, args=pair) for pair in pairs]
        for thread in self.threads:
            thread.start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(1 << 16):
            self.seen += data
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(10)


def shake(channels: tuple[Channel, Channel], aside: Callable[..., Future[Any]], tls: tuple[Tls, Tls] | None) -> None:
    """Both handshakes on both ends."""
    client, server = channels
    if tls is not None:
        secured = aside(server.secure, tls[1], is_server=True, timeout_s=5)
        client.secure(tls[0], is_server=False, timeout_s=5)
        secured.result(5)
    proved = aside(auth.authenticate_server, server, **SIDES, timeout_s=5)
    auth.authenticate_client(client, **SIDES, timeout_s=5)
    proved.result(5)


@pytest.mark.parametrize("is_tls", [True, False])
def test_bytes_on_the_way_are_readable_only_without_tls(
    members: dict[str, Config], aside: Callable[..., Future[Any]], is_tls: bool
) -> None:
    """Body and bulk arrive as sent; the recorder between the ends finds them in plain frames, and never under TLS."""
    relay = Relay()
    with Channel(relay.left) as client, Channel(relay.right) as server:
        shake((client, server), aside, (tls_of(members["a"]), tls_of(members["b"])) if is_tls else None)
        bulk = MARK * 20_000
        sent = aside(client.send, Kind.CHUNK, 7, MARK, [memoryview(bulk)], deadline_s=10)
        frame = server.recv(timeout_s=10)
        assert frame.data == MARK
        got = bytearray(frame.bulk_bytes)
        server.recv_bulk_digests([[memoryview(got)]], [], timeout_s=10)
        sent.result(10)
        assert got == bulk
    relay.join()
    assert (MARK in relay.seen) is not is_tls
    assert (b"holder" in relay.seen) is not is_tls


def test_both_directions_at_once_through_small_buffers(
    members: dict[str, Config], aside: Callable[..., Future[Any]]
) -> None:
    """Partial writes, records cut anywhere and two threads on one connection: every byte arrives in its place."""
    left, right = socket.socketpair()
    for sock in (left, right):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    with Channel(left) as client, Channel(right) as server:
        shake((client, server), aside, (tls_of(members["a"]), tls_of(members["b"])))
        bulk = [memoryview(os.urandom(size)) for size in (1, 331, 0, 3 << 20, 17, 20_000)]

        def take(end: Channel) -> bytes:
            got = bytearray(end.recv(timeout_s=20).bulk_bytes)
            end.recv_bulk_digests([[memoryview(got)]], [], timeout_s=20)
            return bytes(got)

        work = [aside(end.send, Kind.CHUNK, 1, b"body", bulk, deadline_s=20) for end in (client, server)]
        taken = [aside(take, end) for end in (client, server)]
        assert all(part.result(30) == b"".join(bulk) for part in taken)
        assert [part.result(30) for part in work] == [None, None]
        client.send(Kind.BYE, deadline_s=5)
        assert server.recv(timeout_s=5).kind is Kind.BYE


def test_a_controllers_loop_reads_and_writes_over_tls(
    members: dict[str, Config], aside: Callable[..., Future[Any]]
) -> None:
    """Reports that TLS has read already come though no socket tells, and orders that wait for room lose nothing."""
    left, right = socket.socketpair()
    given: list[Any] = []
    loop = SessionLoop(lambda _, message: given.append(message))
    with Channel(left) as near, Channel(right) as holder:
        shake((near, holder), aside, (tls_of(members["a"]), tls_of(members["b"])))
        reports = [FactsWritten(seq=seq) for seq in range(3 * FRAMES_A_TURN)]
        packed = [encode_frame(Kind.EVENT, report) for report in reports]
        orders = [WriteJournal(keep=None, records=(os.urandom(seq * 2000),), seq=seq) for seq in range(60)]
        session = Session("a", 1, near)
        holder._sock.sendmsg([memoryview(b"".join(packed[: FRAMES_A_TURN + 5]))])  # one record, more than a turn's
        for sock in (near._sock, holder._sock):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        loop.add(session)
        wait_for(lambda: loop.turn(0.01) or len(given) >= FRAMES_A_TURN + 5, "what TLS has read", 20.0)
        said = aside(lambda: [holder.send(Kind.EVENT, 0, r, deadline_s=20) for r in reports[FRAMES_A_TURN + 5 :]])
        for order in orders:
            loop.send(session, encode_frame(Kind.EVENT, order))
            loop.flush()
        assert session.outbox
        taken = aside(lambda: [decode_order(holder.recv(timeout_s=20).data) for _ in orders])
        wait_for(lambda: loop.turn(0.01) or (taken.done() and len(given) >= len(reports)), "both ways")
        assert (taken.result(20), given) == (orders, reports)
        said.result(20)
        holder.close()
        wait_for(lambda: loop.turn(0.01) or len(given) > len(reports), "the end")
        assert isinstance(given[-1], SessionEnded)
    loop.close()


def test_a_tls_channel_closes_and_times_out_as_a_plain_one(
    members: dict[str, Config], aside: Callable[..., Future[Any]]
) -> None:
    """A quiet peer is a timeout that leaves the channel usable; another thread's close() wakes a receiver."""
    left, right = socket.socketpair()
    with Channel(left) as client, Channel(right) as server:
        shake((client, server), aside, (tls_of(members["a"]), tls_of(members["b"])))
        with pytest.raises(PeerTimeout):
            server.recv(timeout_s=0.02)
        client.send(Kind.EVENT, 3, deadline_s=5)
        assert server.recv(timeout_s=5).request_id == 3
        waiting = aside(server.recv, timeout_s=10)
        wait_for(server._recv_lock.locked, "the receiver waits")
        server.close()
        assert type(waiting.exception(10)) is PeerUnreachable
        with pytest.raises(PeerUnreachable):
            client.recv(timeout_s=5)


def test_a_handshake_passed_on_by_another_member_is_refused(
    members: dict[str, Config], aside: Callable[..., Future[Any]]
) -> None:
    """A member without the secret stands between two that have it: the proofs name the certificate each end saw."""
    first, second = socket.socketpair(), socket.socketpair()
    with Channel(first[0]) as client, Channel(first[1]) as one, Channel(second[0]) as two, Channel(second[1]) as server:
        a, b = tls_of(members["a"]), tls_of(members["b"])
        ends = [(one, a, True), (server, b, True), (two, a, False), (client, a, False)]
        secured = [aside(end.secure, tls, is_server=is_server, timeout_s=5) for end, tls, is_server in ends]
        assert [done.result(5) for done in secured] == [None] * 4
        proofs = [
            aside(auth.authenticate_client, client, **SIDES, timeout_s=5),
            aside(auth.authenticate_server, server, **SIDES, timeout_s=5),
        ]
        for source, sink in ((one, two), (two, one)):
            frame = source.recv(timeout_s=5)
            sink.send(frame.kind, 0, bytes(frame.data), deadline_s=5)
        assert type(proofs[0].exception(5)) is AuthenticationError
        two.close()
        assert isinstance(proofs[1].exception(5), TransportError)


@pytest.mark.parametrize("fault", ["stranger client", "no certificate", "stranger server", "TLS 1.2"])
def test_both_ends_show_a_certificate_of_the_store_in_the_newest_tls(
    members: dict[str, Config], aside: Callable[..., Future[Any]], fault: str
) -> None:
    """A process that has none of the store's authority, or speaks an older TLS, never reaches the proofs, on either
    side.
    """
    client_tls = tls_of(members["stranger" if fault == "stranger client" else "a"])
    server_tls = tls_of(members["stranger" if fault == "stranger server" else "b"])
    if fault == "no certificate":
        client_tls = replace(client_tls, client=_without_certificate(members["a"]))
    elif fault == "TLS 1.2":
        client_tls.client.minimum_version = ssl.TLSVersion.TLSv1_2
        client_tls.client.maximum_version = ssl.TLSVersion.TLSv1_2
    elif fault == "stranger client":  # who takes any server
        client_tls.client.verify_mode = ssl.CERT_NONE
    else:  # who takes any client
        server_tls.server.verify_mode = ssl.CERT_NONE
    left, right = socket.socketpair()
    with Channel(left) as client, Channel(right) as server:
        careful, other = (client, server) if fault == "stranger server" else (server, client)
        ends = {client: (client_tls, False), server: (server_tls, True)}
        secured = {
            end: aside(end.secure, tls, is_server=is_server, timeout_s=5) for end, (tls, is_server) in ends.items()
        }
        assert type(secured[careful].exception(10)) is AuthenticationError
        careful.close()
        secured[other].exception(10)


def test_a_certificate_may_come_with_those_between_it_and_the_authority(
    members: dict[str, Config], aside: Callable[..., Future[Any]], tmp_path: Path
) -> None:
    """A file with more than one certificate: its own is the first, and the proofs of both ends name that."""
    chain = b"".join(file_of(members[name], "cert.pem").read_bytes() for name in ("b", "a"))
    left, right = socket.socketpair()
    with Channel(left) as client, Channel(right) as server:
        server_tls = tls_of(changed(members["b"], tmp_path / "chain", cert=chain))
        shake((client, server), aside, (tls_of(members["a"]), server_tls))


def test_a_mute_server_costs_the_callers_deadline(members: dict[str, Config]) -> None:
    """Who calls a TLS port that never answers gives up in its own time."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        caught: list[BaseException] = []

        def call() -> None:
            try:
                connect_tcp(*mute.getsockname(), **SIDES, timeout_s=0.2, tls=tls_of(members["a"]))
            except BaseException as error:
                caught.append(error)

        caller = threading.Thread(target=call, daemon=True)
        caller.start()
        caller.join(10)
        assert [type(error) for error in caught] == [PeerTimeout]


def test_a_mute_client_costs_the_handshakes_deadline(members: dict[str, Config]) -> None:
    """Who connects to a TLS port and says nothing, or drips, is gone at the deadline."""
    options: dict[str, Any] = {**SERVES, "on_channel": lambda *_: None, "handshake_timeout_s": 0.2}
    with Listener.tcp("127.0.0.1", 0, **options, tls=tls_of(members["a"])) as server:
        with socket.create_connection(server.address) as mute:
            mute.settimeout(5)
            mute.sendall(b"\x16\x03\x01")
            assert mute.recv(100) == b""
        wait_for(lambda: server.refused == 1, "the refusal")
        assert "TLS handshake" in server.last_refusal


HOSTS = {"h0": {"rack": "r0", "memstore": "replica"}, "h1": {"rack": "r1", "memstore": "replica"}}


def test_a_job_is_put_committed_and_restored_over_tls(
    tmp_path: Path, nursery: RankNursery, members: dict[str, Config]
) -> None:
    """Holders and controller speak TLS; peers without it, or of another authority, change nothing and see nothing."""
    with ProcessCluster(tmp_path, HOSTS, tls_dir=members["a"].tls_dir) as cluster:
        fleet = Fleet(cluster, nursery)
        ranks = fleet.begin(["h0", "h1"], last_step=3)
        before = cluster.settled_inventory(2)
        where, _, port = next(r["address"] for r in cluster.status()["hosts"] if r["host"] == "h0").rpartition(":")
        sides = {
            "secret": cluster.secret,
            "store": cluster.config.store,
            "identity": HolderIdentity(host="h9", incarnation=1),
        }
        no_certificate = tls_of(members["a"])
        no_certificate = replace(no_certificate, client=_without_certificate(members["a"]))
        for tls, expected in (
            (None, (ProtocolError, PeerUnreachable)),
            (tls_of(members["stranger"]), (AuthenticationError,)),
            (no_certificate, (AuthenticationError, PeerUnreachable)),
        ):
            with pytest.raises(expected):
                connect_tcp(where, int(port), **sides, timeout_s=5, tls=tls)
        assert cluster.settled_inventory(2) == before
        together(ranks, "train", first=4, last=5)
        fleet.kill(ranks)
        cluster.lose_host("h1")
        cluster.start_holder("h1")
        wait_for(lambda: cluster.host_status().get("h1") == "dead", "the loss is known")
        cluster.wait_live("h0", "h1")
        ranks, got = fleet.resume(["h0", "h1"])
        assert (got["step"], got["steps_lost"]) == (5, 0)
        together(ranks, "train", first=6, last=7)


def _without_certificate(config: Config) -> Any:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(file_of(config, "ca.pem"))
    return context


@pytest.mark.parametrize("name", ["cert", "key", "ca"])
def test_half_a_configuration_is_refused(members: dict[str, Config], tmp_path: Path, name: str) -> None:
    """A part of the files, a relative path, a setting of before: a ConfigError that says what there is."""
    with pytest.raises(ConfigError, match=r"cannot be set up.*cert\.pem, key\.pem and ca\.pem"):
        Tls.load(changed(members["a"], tmp_path / "half", **{name: None}))
    with pytest.raises(ConfigError, match="not an absolute path"):
        Config(tls_dir="tls")
    with pytest.raises(ConfigError, match="tls_dir"):
        Config().with_fields({f"tls_{name}": "/tls/file.pem"})


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        (["--tls-dir", "tls"], {}, "not an absolute path"),
        ([], {"MEMSTORE_TLS_DIR": "tls"}, "not an absolute path"),
        (["--tls-cert", "/c.pem"], {}, "No such option"),
    ],
)
def test_up_takes_the_folder_as_an_option_or_from_the_environment(
    arguments: list[str], env: dict[str, str], words: str
) -> None:
    """A relative path, or an option of before, is wrong usage before anything is started."""
    result = CliRunner().invoke(main, ["up", *arguments], env=env)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620])
def test_a_key_that_others_can_read_is_refused(members: dict[str, Config], tmp_path: Path, mode: int) -> None:
    """A key open to others or a group is a ConfigError naming the mode; so is another one's certificate an error."""
    open_one = changed(members["a"], tmp_path / "open")
    file_of(open_one, "key.pem").chmod(mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}"):
        Tls.load(open_one)
    with pytest.raises(ConfigError, match="cannot be set up"):
        Tls.load(changed(members["a"], tmp_path / "other", key=file_of(members["b"], "key.pem")))


def test_a_secret_of_kubernetes_is_copied_so_that_its_key_is_taken(members: dict[str, Config], tmp_path: Path) -> None:
    """Mounted, its files are links to files of the pod's group; the init container of the manifests makes them ours."""
    [pod] = [p for p in pods(composed(["tls"])) if any(c["name"] == "ray-worker" for c in p["containers"])]
    [volume] = [each["secret"] for each in pod["volumes"] if each["name"] == "tls-secret"]
    mounted, ours = tmp_path / "tls-secret", tmp_path / "tls"
    (mounted / "..data").mkdir(parents=True)
    ours.mkdir()
    for item in volume["items"]:
        file = mounted / "..data" / item["path"]
        file.write_bytes(file_of(members["a"], item["path"]).read_bytes())
        file.chmod(volume["defaultMode"])
        (mounted / item["path"]).symlink_to(Path("..data") / item["path"])
    with pytest.raises(ConfigError, match="0440"):
        Tls.load(Config(tls_dir=str(mounted)))
    [prepare] = [each for each in pod["initContainers"] if each["name"] == "tls"]
    command = [
        word.replace("/tls-secret/", f"{mounted}/").replace(" /tls/", f" {ours}/") for word in prepare["command"]
    ]
    subprocess.run(command, check=True)
    assert tls_of(Config(tls_dir=str(ours))).own_digest == tls_of(members["a"]).own_digest


def test_a_key_with_a_password_is_refused_not_asked_for(members: dict[str, Config], tmp_path: Path) -> None:
    """A password cannot be typed at every host: OpenSSL would wait there for the password."""
    from cryptography.hazmat.primitives import serialization

    plain = serialization.load_pem_private_key(file_of(members["a"], "key.pem").read_bytes(), None)
    form, sealed = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    key = plain.private_bytes(serialization.Encoding.PEM, form, sealed)
    with pytest.raises(ConfigError, match="has a password"):
        Tls.load(changed(members["a"], tmp_path / "sealed", key=key))


def test_a_plain_frame_header_is_not_taken_for_tls(members: dict[str, Config]) -> None:
    """A plain hello on a TLS port is refused before anything is answered but an alert."""
    with Listener.tcp("127.0.0.1", 0, **SERVES, on_channel=lambda *_: None, tls=tls_of(members["a"])) as server:
        with socket.create_connection(server.address) as plain:
            plain.settimeout(5)
            plain.sendall(wire.pack_header(Kind.HELLO))
            answer = b""
            while part := plain.recv(100):
                answer += part
        assert len(answer) < 16
        wait_for(lambda: server.refused == 1, "the refusal")
