"""What releases wrote is read byte for byte, or refused by its number; who may be upgraded in place (R40)."""

from __future__ import annotations

import importlib.util
import io
import json
import lzma
import tarfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
import xxhash
from repository import ROOT

from memstore.core.durable import markers, slice_format
from memstore.core.durable.markers import decode_marker, encode_marker
from memstore.core.format import layout, manifest
from memstore.core.format.layout import decode_layout
from memstore.core.format.manifest import PARITY_FORMAT, decode_manifest, encode_manifest, summand_manifest
from memstore.core.format.releases import FORMATS, RELEASES, Build, hosts_to_restart, reader_of, refused_upgrade
from memstore.core.journal import records
from memstore.core.journal.records import Entry, entries_of, entry_from_record, other_format, with_parts
from memstore.core.wire import frame
from memstore.distribution import VERSION
from memstore.errors import IntegrityError, ManifestMismatch, ProtocolError
from memstore.shell.arena import slot_headers
from memstore.shell.arena.journal_file import read_records

GOLDEN = ROOT / "tests" / "golden"
NOW = Build(VERSION, FORMATS)


def golden_script() -> ModuleType:
    """Return the script that keeps what a release writes."""
    spec = importlib.util.spec_from_file_location("golden", ROOT / ".ci" / "golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def formats_of(release: str) -> Mapping[str, int]:
    """Return what the golden files of a release say of themselves."""
    formats: Mapping[str, int] = json.loads((GOLDEN / release / "about.json").read_text())["formats"]
    return formats


def golden_files(release: str) -> dict[str, bytes]:
    """Return the files of a release's store by name: `h0/journal`, `durable/copies/1/1/marker`."""
    with tarfile.open(GOLDEN / release / "store.tar.xz") as archive:
        return {
            member.name: file.read()
            for member in archive.getmembers()
            if member.isfile() and (file := archive.extractfile(member)) is not None
        }


def test_the_table_says_what_this_release_writes() -> None:
    """Who raises a number adds the row of the next release."""
    assert FORMATS == {
        "wire": frame.VERSION,
        "arena": slot_headers.FORMAT_VERSION,
        "journal": records.RECORD_VERSION,
        "manifest": manifest.FORMAT,
        "parity": manifest.PARITY_FORMAT,
        "layout": layout.FORMAT,
        "marker": markers.VERSION,
        "slice": slice_format.VERSION,
    }
    for one, other in zip(RELEASES.values(), list(RELEASES.values())[1:], strict=False):
        in_folder = [part for part in ("manifest", "parity", "layout") if one[part] != other[part]]
        assert not in_folder or one["arena"] != other["arena"], "the slot table's number stands for the whole folder"


def test_an_error_names_who_reads_a_format() -> None:
    """A release, none, or one that is not known here."""
    assert reader_of("arena", FORMATS["arena"]) == f"memstore {VERSION} reads it"
    assert "a build before 0.2.0 wrote it" in reader_of("journal", 9)
    assert "a release after" in reader_of("marker", 99)


@pytest.mark.parametrize("release", sorted(RELEASES))
class TestGoldenFiles:
    """What a release wrote."""

    def test_frames_are_the_same_or_refused(self, release: str) -> None:
        """A message that changed has another wire version: this process says both numbers."""
        data = lzma.decompress((GOLDEN / release / "frames.xz").read_bytes())
        assert formats_of(release) == RELEASES[release]
        if formats_of(release)["wire"] == FORMATS["wire"]:
            assert data == golden_script().frames()
        else:
            with pytest.raises(ProtocolError, match=f"speaks wire version {formats_of(release)['wire']}"):
                frame.unpack_header(data[: frame.HEADER_BYTES])

    def test_a_journal_is_read_byte_for_byte(self, release: str, tmp_path: Path) -> None:
        """Each record gives its fact, and what this host keeps of it, and these the record."""
        path = tmp_path / "journal"
        path.write_bytes(golden_files(release)["h0/journal"])
        path.chmod(0o600)
        found = read_records(path)
        assert len(found) > 5
        if formats_of(release)["journal"] != FORMATS["journal"]:
            assert f"memstore {release} reads it" in other_format(found[0])
            return
        made = [Entry(entry.term, entry.seq, entry.fact) for entry in entries_of("h0", found)]
        assert list(with_parts(made, "h0")) == found

    def test_manifests_and_layouts_are_read_byte_for_byte(self, release: str) -> None:
        """Of copies and of parity."""
        found = [data for name, data in golden_files(release).items() if name.startswith("h0/manifests/")]
        assert len(found) == 4
        if any(formats_of(release)[part] != FORMATS[part] for part in ("manifest", "parity", "layout")):
            return  # the slot table's number refuses the folder
        parity = 0
        for data in found:
            made = decode_manifest(data)
            assert encode_manifest(made) == data
            layouts = [made.layout]
            if made.format == PARITY_FORMAT:
                rows = [summand_manifest(made, rank) for rank in range(5)]
                layouts = [decode_manifest(row).layout for row in rows if row is not None]
                parity += len(layouts)
            for one in layouts:
                assert decode_layout(one).nbytes
        assert parity == 4

    def test_durable_steps_are_read_byte_for_byte(self, release: str) -> None:
        """Markers, and the slices that they name."""
        files = {name: data for name, data in golden_files(release).items() if name.startswith("durable/")}
        if any(formats_of(release)[part] != FORMATS[part] for part in ("marker", "slice")):
            return
        marker = decode_marker(data := files["durable/copies/1/1/marker"])
        assert encode_marker(marker.job, marker.marker, marker.lineage) == data
        assert any(uses for uses in marker.marker.uses.values()), "a slice reads an older one"
        slices = 0
        for name, data in files.items():
            if not name.startswith("durable/copies/1/1/rank-"):
                continue
            rank, number = map(int, name.partition("rank-")[2].split(".")[:2])
            header = slice_format.decode_header(data, marker.marker.specs[rank], number, file_nbytes=len(data))
            assert data.startswith(header.encode())
            slices += 1
        assert slices == 8


def test_other_numbers_are_refused_by_name() -> None:
    """Each says which number it is, and who reads it."""
    files = golden_files(VERSION)
    record = bytearray(next(iter(_payloads(files["h0/journal"]))))
    record[16] = FORMATS["journal"] + 1
    with pytest.raises(ProtocolError, match=r"format \d+, not \d+: a release after 0\.2\.0 wrote it"):
        entry_from_record(bytes(record))
    data = bytearray(next(data for name, data in files.items() if name.startswith("h0/manifests/")))
    data[1] = 9
    with pytest.raises(ManifestMismatch, match=r"has format 9; .* a release after"):
        decode_manifest(bytes(data))
    text = files["durable/copies/1/1/marker"].replace(b"memstore-marker 4", b"memstore-marker 3")[:-33]
    with pytest.raises(IntegrityError, match="format 3, this memstore reads 4: a build before"):
        decode_marker(text + xxhash.xxh3_128_hexdigest(text).encode() + b"\n")


def _payloads(journal: bytes) -> list[bytes]:
    stream, found = io.BytesIO(journal), []
    while head := stream.read(12):
        found.append(stream.read(int.from_bytes(head[:4], "little")))
    return found


def newer(**formats: int) -> Build:
    """Return the build of a later release."""
    return Build("0.3.0", {**FORMATS, **formats})


def test_ranks_that_run_must_understand_the_holder_that_comes() -> None:
    """Another wire ends the training first; another arena or journal wants the step made durable."""
    running, wire = {"h1": NOW, "h2": NOW}, FORMATS["wire"]
    assert refused_upgrade(running, {"h1": newer(), "h2": newer()}) == ""
    assert refused_upgrade(running, {"h1": newer(manifest=2), "h2": newer(manifest=2)}) == ""
    words = refused_upgrade(running, {"h1": newer(wire=wire + 1), "h2": newer(wire=wire + 1)})
    assert f"memstore 0.3.0 is installed on h1, {VERSION} runs there: wire format {wire} becomes {wire + 1}" in words
    assert "End the training, then `memstore down` and `memstore up`: the arenas stay" in words
    words = refused_upgrade(running, {"h1": newer(wire=wire + 1, arena=4), "h2": newer(wire=wire + 1, arena=4)})
    assert "arena format 3 becomes 4" in words
    assert "`memstore persist JOB`" in words


def test_one_version_is_installed_everywhere_first() -> None:
    """Both are named, with the hosts."""
    words = refused_upgrade({"h1": NOW, "h2": NOW}, {"h1": newer(), "h2": NOW})
    assert words == (
        f"different versions are installed: {VERSION} on h2; 0.3.0 on h1. Install one everywhere, then upgrade"
    )


def test_what_does_not_say_its_formats_is_not_upgraded_in_place() -> None:
    """A holder of a build that announced none."""
    assert "arena format unknown becomes 3" in refused_upgrade({"h1": Build()}, {"h1": NOW})


def test_only_hosts_that_run_something_else_are_restarted() -> None:
    """So a second call goes on where the first one stopped."""
    running, installed = {"h1": newer(), "h2": NOW}, {"h1": newer(), "h2": newer()}
    assert hosts_to_restart(running, installed, chosen=(), is_restart=False) == ["h2"]
    assert hosts_to_restart(running, installed, chosen=(), is_restart=True) == ["h1", "h2"]
    assert hosts_to_restart(running, installed, chosen=("h1",), is_restart=True) == ["h1"]
    assert hosts_to_restart(running, installed, chosen=("h1",), is_restart=False) == []
