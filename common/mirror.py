"""Versions on this host: the trainer's segment where it is here, else one streamed copy for all.

The first process of a host that wants a version streams it; the others wait for its lock and map
what it brought. What a killed process had received stays in a `.part` file, and the next one hashes
that and fetches the rest: there is no path for restarts. What is here is passed on to other hosts,
also while it arrives.
"""

import asyncio
import contextlib
import fcntl
import mmap
import operator
import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from common.delta import encode
from common.digests import hash_chunk, hash_pieces
from common.errors import ShardCorrupt, StreamBroken, VersionGone
from common.membership import MEMORY, memory_label
from common.messages.blob import Blob
from common.messages.coordinator import Manifest
from common.segment import element_bytes
from common.stream import Base, Chunk, Encoding, Streamer, StreamServer

log = structlog.get_logger()

LOCK_RETRY_S = 0.05
"""Nobody is told when a file lock is free."""
SPOT_CHECKS = 4
"""Chunks that tell a segment from a file of the same name on another host. Readers check all."""
PART, LOCK = ".part", ".lock"


@dataclass
class _Copy:
    """A version in a file of this host, complete or arriving. A `ChunkSource` for other hosts."""

    manifest: Manifest
    view: memoryview
    have: bytearray
    base: Base | None = None
    descriptor: int = -1
    """Open while the copy is in use, with a shared lock: whoever leaves last removes the file."""

    def chunk(self, number: int, base: str) -> Chunk | None:
        """See `ChunkSource.chunk`."""
        if number >= len(self.have):
            raise ValueError(f"chunk {number} of {len(self.have)}")
        if not self.have[number]:
            return None
        size = self.manifest.chunk_bytes
        start, end = number * size, (number + 1) * size
        if self.base is None or base != self.base.digest:
            return Chunk(Encoding.FULL, self.view[start:end])
        return encode(self.base.view[start:end], self.view[start:end], element_bytes(self.manifest))

    def close(self) -> None:
        """Let go of the file, and remove it if nobody else of the host uses it."""
        if self.descriptor < 0:
            return
        path = Path(self.manifest.segment)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(self.descriptor).st_ino:
                path.unlink()
        os.close(self.descriptor)
        self.descriptor = -1


class Mirror:
    """Brings versions to this host and serves them to others. One for each process.

    Args:
        run_id: names the files.
        streamer: brings bytes.
        server: passes them on.
        directory: the memory file system.
        memory: its name among members; found out when empty.
    """

    def __init__(
        self,
        run_id: str,
        streamer: Streamer,
        server: StreamServer,
        directory: Path = MEMORY,
        memory: str = "",
    ) -> None:
        self._streamer, self._server = streamer, server
        self._stem = directory / f"libra-{run_id}-m-"
        self._newest: _Copy | None = None
        self.labels = {"memory": memory or memory_label(directory), "stream": server.address}
        """Of the member: which memory it sees, and where it passes chunks on."""
        self.streamed_bytes = 0
        """Received from other hosts, since the start."""

    async def bring(
        self, manifest: Manifest, sources: Sequence[str], *, timeout_s: float
    ) -> Manifest:
        """The same version, with a segment that this process can open.

        Raises:
            StreamBroken: no source gave the bytes in time.
            ShardCorrupt: the sources gave wrong bytes.
            VersionGone: it is not here, and there is nobody to ask.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        if await loop.run_in_executor(None, _is_here, manifest.blob):
            return manifest
        path = Path(f"{self._stem}{manifest.digest[:16]}")
        local = manifest.model_copy(update={"segment": str(path)})
        if not _is_whole(path, manifest.length):
            if not sources:
                raise VersionGone(manifest.version)
            async with _locked(path, manifest.digest, deadline):
                if not _is_whole(path, manifest.length):  # Somebody else brought it meanwhile.
                    await self._stream(local, sources, deadline)
                self._adopt(local)
        else:
            self._adopt(local)
        return local

    def close(self) -> None:
        """Serve nothing more; the last process of the host removes the copy."""
        if self._newest is not None:
            self._server.withdraw(self._newest.manifest.digest)
            self._newest.close()
            self._newest = None

    async def _stream(self, local: Manifest, sources: Sequence[str], deadline: float) -> None:
        loop = asyncio.get_running_loop()
        began, digest = loop.time(), local.digest
        part = Path(local.segment + PART)
        try:
            resumed, view = _open_part(part, local.length)
        except OSError as error:
            reason = f"no room in {part.parent}: {error.strerror}"
            raise StreamBroken("this host", digest, 0, reason) from error
        have = bytearray(len(local.chunks))
        if resumed:
            there = await loop.run_in_executor(None, hash_pieces, [view], local.chunk_bytes)
            have[:] = map(operator.eq, there, local.chunks)
        found = sum(have)
        newest = self._newest
        base = Base(newest.manifest.digest, newest.view) if newest is not None else None
        if base is not None and len(base.view) != local.length:
            base = None
        self._server.offer(digest, _Copy(local, view, have, base))
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._server.withdraw, digest)
            try:
                fetched = await self._streamer.fetch(
                    local.blob,
                    view,
                    have,
                    sources,
                    base=base,
                    timeout_s=max(deadline - loop.time(), LOCK_RETRY_S),
                    on_chunk=lambda _: self._server.arrived(),
                )
            except ShardCorrupt as error:
                raise ShardCorrupt(local.version, error.where) from error
            on_failure.pop_all()
        os.replace(part, local.segment)  # noqa: PTH105  No disk behind it: nothing blocks.
        self.streamed_bytes += fetched.received_bytes
        log.info(
            "version.mirrored",
            policy_version=local.version,
            bytes=fetched.received_bytes,
            chunks=fetched.chunks,
            deltas=fetched.deltas,
            wrong=fetched.wrong,
            found=found,
            duration_s=loop.time() - began,
        )

    def _adopt(self, local: Manifest) -> None:
        """Keep the newest version as the base of the next, and serve it."""
        newest = self._newest
        if newest is not None and newest.manifest.version >= local.version:
            return
        try:
            copy = _open_copy(local)
        except FileNotFoundError as error:
            raise VersionGone(local.version) from error
        if newest is not None:
            # Who receives the new one may still want differences to the one before.
            if len(newest.view) == len(copy.view):
                copy.base = Base(newest.manifest.digest, newest.view)
            newest.base = None
            self._server.withdraw(newest.manifest.digest)
            os.close(newest.descriptor)
            newest.descriptor = -1
        self._newest = copy
        self._server.offer(local.digest, copy)
        self._remove_older(Path(local.segment))

    def _remove_older(self, path: Path) -> None:
        """Whoever has an older one mapped keeps it."""
        age = path.stat().st_mtime_ns
        for other in sorted(path.parent.glob(f"{self._stem.name}*")):
            whole = other.with_name(other.name.removesuffix(LOCK).removesuffix(PART))
            if whole == path:
                continue
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                if other.stat().st_mtime_ns <= age:
                    with _lock(whole):
                        other.unlink()


def _is_whole(path: Path, length: int) -> bool:
    try:
        return path.stat().st_size == length
    except OSError:
        return False


def _is_here(blob: Blob) -> bool:
    """Whether the owner's file can be mapped here, and is what it is said to be."""
    path = Path(blob.path)
    if not _is_whole(path, blob.length):
        return False
    count = len(blob.chunks)
    numbers = {index * (count - 1) // max(SPOT_CHECKS - 1, 1) for index in range(SPOT_CHECKS)}
    try:
        with path.open("rb") as file:
            for number in sorted(numbers) if count else ():
                file.seek(number * blob.chunk_bytes)
                if hash_chunk(file.read(blob.chunk_bytes)) != blob.chunks[number]:
                    return False
    except OSError:
        return False
    return True


def _open_part(part: Path, length: int) -> tuple[bool, memoryview]:
    """Map the file that is being received; whether it was there, and its bytes."""
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        resumed = os.fstat(descriptor).st_size == length
        if not resumed:
            os.ftruncate(descriptor, 0)
        # Taken now: a full memory file system is an error here and a SIGBUS later.
        os.posix_fallocate(descriptor, 0, length)
        return resumed, memoryview(mmap.mmap(descriptor, length))
    finally:
        os.close(descriptor)


def _open_copy(local: Manifest) -> _Copy:
    descriptor = os.open(local.segment, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    view = memoryview(mmap.mmap(descriptor, local.length, access=mmap.ACCESS_READ))
    return _Copy(local, view, bytearray(b"\1" * len(local.chunks)), descriptor=descriptor)


@contextlib.contextmanager
def _lock(path: Path):  # noqa: ANN202  A context manager of nothing.
    """Be the one process of the host that touches the copy. Freed by the kernel if it dies.

    Raises:
        BlockingIOError: another one is.
    """
    lock = Path(f"{path}{LOCK}")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            same = lock.stat().st_ino == os.fstat(descriptor).st_ino
        except FileNotFoundError:
            same = False
        if not same:  # It was removed between the two calls; who comes next makes another.
            raise BlockingIOError
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


@contextlib.asynccontextmanager
async def _locked(path: Path, digest: str, deadline: float) -> AsyncGenerator[None]:
    """As `_lock`, but wait for it until the deadline."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(_lock(path))
                break
            except BlockingIOError:
                if loop.time() + LOCK_RETRY_S >= deadline:
                    reason = "another process receives it and is not done in time"
                    raise StreamBroken("this host", digest, 0, reason) from None
            await asyncio.sleep(LOCK_RETRY_S)
        yield
