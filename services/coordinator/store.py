"""The published versions as others stream them: chunks of the trainer's segments, or deltas.

Nothing is copied and nothing is computed before somebody on another host asks: a run on one host
pays nothing. A delta is made when a receiver that has the version before asks for the first
time, and its chunks are kept in a file on the memory file system for the next receivers.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import structlog

from common.delta import encode
from common.messages.coordinator import Manifest
from common.segment import MappedSegment, element_bytes
from common.stream import Chunk, Encoding, StreamServer

log = structlog.get_logger()


class Served(MappedSegment):
    """A segment that others stream."""

    kept = True
    """False once the trainer may overwrite the segment."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Where an encoded chunk lies in the file of deltas."""

    encoding: Encoding
    start: int
    length: int


class VersionSource:
    """Chunks of one version. Called on the stream server's thread."""

    def __init__(self, version: Served, base: Served | None, deltas: Path) -> None:
        self._version, self._base = version, base
        self._deltas = deltas
        self._file: BinaryIO | None = None
        self._kept: dict[int, Kept] = {}
        self._changed_too_much: set[int] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._element_bytes = element_bytes(version.manifest)

    @property
    def segment(self) -> str:
        """Path of the file that is served."""
        return self._version.manifest.segment

    def chunk(self, number: int, base: str) -> Chunk | None:
        """The chunk as a delta to `base` if that is the version before, else in full."""
        whole = self._version.chunk(number)
        before = self._base
        if before is None or before.manifest.digest != base:
            return Chunk(Encoding.FULL, whole)
        with self._lock:
            kept = self._kept.get(number) or self._encode(number, before, whole)
            if kept is None or self._file is None:
                return Chunk(Encoding.FULL, whole)
            self._file.seek(kept.start)
            return Chunk(kept.encoding, self._file.read(kept.length))

    def _encode(self, number: int, before: Served, whole: memoryview) -> Kept | None:
        if self._closed or not before.kept or number in self._changed_too_much:
            return None
        encoded = encode(before.chunk(number), whole, self._element_bytes)
        if encoded.encoding is Encoding.FULL:
            self._changed_too_much.add(number)
            return None
        # Unless the trainer may have begun to overwrite what was just read.
        return self._keep(number, encoded) if before.kept else None

    def _keep(self, number: int, encoded: Chunk) -> Kept:
        if self._file is None:
            self._file = self._deltas.open("w+b")
        start = self._file.seek(0, 2)
        self._file.write(encoded.payload)
        self._file.flush()
        kept = Kept(encoded.encoding, start, len(encoded.payload))
        self._kept[number] = kept
        return kept

    def close(self) -> None:
        """Remove the deltas."""
        with self._lock:
            self._closed = True
            if self._file is not None:
                self._file.close()
                self._file = None
                self._deltas.unlink(missing_ok=True)


class VersionStore:
    """Offers versions to streaming receivers, from their announcement to their release."""

    def __init__(self, server: StreamServer, directory: Path, run_id: str) -> None:
        self._server = server
        self._stem = directory / f"libra-{run_id}-d-"
        self._sources: dict[str, VersionSource] = {}
        self._mapped: dict[str, Served] = {}

    @property
    def address(self) -> str:
        """Where versions are streamed from."""
        return self._server.address

    def sweep(self) -> None:
        """Remove deltas that a killed coordinator of this run left; nobody else makes any."""
        for path in self._stem.parent.glob(f"{self._stem.name}*"):
            path.unlink(missing_ok=True)

    def offer(self, manifest: Manifest, base: Manifest | None) -> None:
        """Serve a version from now on; a second time changes nothing.

        Raises:
            WeightError: the segment is not there, or is another file by now.
        """
        digest = manifest.digest
        if digest in self._sources and self._sources[digest].segment == manifest.segment:
            return
        version = Served.open(manifest)
        self._withdraw(digest)  # The same weights in another segment: the old one is written next.
        before = self._mapped.get(base.digest) if base else None
        same_shape = before is not None and before.manifest.length == manifest.length
        source = VersionSource(
            version, before if same_shape else None, Path(f"{self._stem}{digest[:16]}")
        )
        self._sources[digest], self._mapped[digest] = source, version
        self._server.offer(digest, source)

    def keep(self, read: Sequence[Manifest], base: Manifest | None) -> None:
        """Let go of every version that is neither read nor the base of deltas."""
        wanted = {manifest.digest for manifest in read}
        for digest in [digest for digest in self._sources if digest not in wanted]:
            self._withdraw(digest)
        if base is not None:
            wanted.add(base.digest)
        for digest in [digest for digest in self._mapped if digest not in wanted]:
            self._mapped.pop(digest).kept = False

    def _withdraw(self, digest: str) -> None:
        source = self._sources.pop(digest, None)
        if source is not None:
            self._server.withdraw(digest)
            source.close()

    def close(self) -> None:
        """Remove what lies in memory."""
        self.keep([], None)
