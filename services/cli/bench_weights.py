"""`libra bench weights`: how fast and how dear weights move, against the plain ways to do it.

Every sender and receiver is a process of its own, started before the first measurement; costs are
the CPU time of both with all their threads. The rounds are interleaved and ratios are taken within
a round, so that a disturbance of the machine meets all ways. Checked ways compare every chunk with
its hash, as a run does.

Through shaped links the time of one transfer over one link is the unit: a star to eight receivers
takes eight of them, a chain little more than one.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from common.membership import MEMORY
from common.messages.coordinator import Manifest
from common.stream import CHUNK_BYTES
from services.cli.bench import BenchReport, Check, at_least, at_most
from services.cli.bench_weights_links import Host, LinksUnavailable, hosts
from services.coordinator.manifest import build_manifest

RECEIVERS = (1, 2, 4, 8)
ROUNDS = 3
LOCAL_BYTES = 96 << 20
LINK_BYTES = 80 << 20
"""Twenty chunks: each host of a chain is one behind the one before it."""
LINK_BYTES_PER_S = 32 << 20
"""So slow that two cores serve eight of them."""
CHANGED_SHARE = 0.011
"""Of the bfloat16 elements in one step at a learning rate of 1e-6."""
WAYS = ("memcpy", "raw", "raw checked", "stream", "map")
GLOO_RANKS = (2, 4)
CHILD_TIMEOUT_S = 180.0
LOCALHOST = "127.0.0.1"


@dataclass
class Peer:
    """A process that obeys one order at a time."""

    process: "subprocess.Popen[str]"

    def order(self, order: dict[str, Any]) -> None:
        """Tell it, and do not wait."""
        assert self.process.stdin
        print(json.dumps(order), file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """What it says when it is done."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"{self.process.args} ended"
        return json.loads(line)

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Both."""
        self.order(order)
        return self.answer()


@dataclass(frozen=True, slots=True)
class Took:
    """One way to so many receivers."""

    gb_per_s: float
    """All receivers together."""
    cpu_s_per_gb: float
    """Sender and receivers, for what arrived."""
    receiver_cpu_s_per_gb: float
    wall_s: float


def bench_weights() -> BenchReport:
    """Measure everything."""
    with tempfile.TemporaryDirectory(prefix="libra-bench-", dir=MEMORY) as name:
        directory = Path(name)
        figures: dict[str, Any] = {}
        checks = _bench_local(directory, figures)
        figures["gloo"] = _bench_gloo(directory)
        checks += _bench_links(directory, figures)
        checks += _bench_steps(figures)
    return BenchReport("weights", figures, checks)


def _bench_local(directory: Path, figures: dict[str, Any]) -> list[Check]:
    manifest = build_manifest(1, str(_segment(directory / "w0", LOCAL_BYTES)))
    local: dict[str, list[Took]] = {}
    ratios: list[float] = []
    with ExitStack() as stack:
        source = stack.enter_context(_peer("source", directory / "source"))
        addresses = _offer(source, manifest, None)
        receivers = [
            stack.enter_context(_peer("receive", directory / f"r{number}"))
            for number in range(max(RECEIVERS))
        ]
        _measure("memcpy", manifest, addresses, source, receivers)  # Touch all memory once.
        for _ in range(ROUNDS):
            for count in RECEIVERS:
                for way in WAYS:
                    took = _measure(way, manifest, addresses, source, receivers[:count])
                    local.setdefault(f"{way} to {count}", []).append(took)
            ratios.append(_ratio(local))
    figures["one_host"] = {name: _figures(took) for name, took in local.items()}
    mapped = 1 / median(took.receiver_cpu_s_per_gb for took in local["map to 1"])
    return [
        at_least("same host by mapping, per receiver core", mapped, "GB/s", 4.0),
        at_most("CPU stream / raw sockets, both checked", median(ratios), "x", 1.5),
    ]


def _ratio(local: dict[str, list[Took]]) -> float:
    """Of the round that has just ended."""
    return median(
        local[f"stream to {count}"][-1].cpu_s_per_gb
        / local[f"raw checked to {count}"][-1].cpu_s_per_gb
        for count in RECEIVERS
    )


def _measure(
    way: str,
    manifest: Manifest,
    addresses: dict[str, str],
    source: Peer,
    receivers: Sequence[Peer],
) -> Took:
    order: dict[str, Any] = {
        "way": way,
        "blob": manifest.blob.model_dump(),
        "address": addresses["stream" if way == "stream" else "raw"],
    }
    if way == "map":
        order = {"way": way, "manifest": manifest.model_dump()}
    sent = source.ask({"do": "cpu"})["cpu_s"]
    for receiver in receivers:
        receiver.order(order)
    took = [receiver.answer() for receiver in receivers]
    sent = source.ask({"do": "cpu"})["cpu_s"] - sent
    gigabytes = manifest.length * len(receivers) / 1e9
    received = sum(answer["cpu_s"] for answer in took)
    wall_s = max(answer["wall_s"] for answer in took)
    return Took(gigabytes / wall_s, (sent + received) / gigabytes, received / gigabytes, wall_s)


def _figures(took: Sequence[Took]) -> dict[str, float]:
    return {
        "gb_per_s": round(median(t.gb_per_s for t in took), 3),
        "cpu_s_per_gb": round(median(t.cpu_s_per_gb for t in took), 3),
    }


def _bench_gloo(directory: Path) -> dict[str, Any]:
    """Broadcast between processes with torch's own means."""
    figures: dict[str, Any] = {}
    for ranks in GLOO_RANKS:
        command = [sys.executable, "-m", "services.cli.bench_weights_gloo"]
        store = str(directory / f"gloo-{ranks}")
        with ExitStack() as stack:
            children = [
                stack.enter_context(
                    _child([*command, str(rank), str(ranks), store, str(LOCAL_BYTES)])
                )
                for rank in range(ranks)
            ]
            took = [json.loads(c.communicate(timeout=CHILD_TIMEOUT_S)[0]) for c in children]
        gigabytes = LOCAL_BYTES * (ranks - 1) / 1e9
        figures[f"broadcast to {ranks - 1}"] = {
            "gb_per_s": round(gigabytes / max(t["wall_s"] for t in took), 3),
            "cpu_s_per_gb": round(sum(t["cpu_s"] for t in took) / gigabytes, 3),
        }
    return figures


def _bench_steps(figures: dict[str, Any]) -> list[Check]:
    with _child([sys.executable, "-m", "services.cli.bench_weights_steps"]) as child:
        out, _ = child.communicate(timeout=CHILD_TIMEOUT_S)
    steps: dict[str, Any] = json.loads(out)
    figures["adam_steps"] = steps
    exact = all(step["exact"] for step in steps.values())
    return [
        at_least("delta ratio, bf16, lr 1e-6", steps["bf16 lr 1e-06"]["ratio"], "x", 70),
        at_least("delta ratio, bf16, lr 1e-5", steps["bf16 lr 1e-05"]["ratio"], "x", 14),
        at_least("decoded bytes equal the published ones", float(exact), "", 1),
    ]


# ── shaped links ─────────────────────────────────────────────────────────────────────────────────


def _bench_links(directory: Path, figures: dict[str, Any]) -> list[Check]:
    try:
        with hosts(max(RECEIVERS) + 1, LINK_BYTES_PER_S) as found:
            return _measure_links(directory, found, figures)
    except LinksUnavailable as error:
        figures["links"] = f"not measured: {error}"
        return []


def _measure_links(directory: Path, found: Sequence[Host], figures: dict[str, Any]) -> list[Check]:
    old, new = _segment(directory / "w1", LINK_BYTES), directory / "w2"
    _step_after(old, new)
    # A path that no receiver can open: they are on other hosts.
    held = [build_manifest(number, str(path)) for number, path in ((1, old), (2, new))]
    first, second = map(_elsewhere, held)
    with ExitStack() as stack:
        source = stack.enter_context(_peer("source", directory / "links", found[0]))
        addresses = _offer(source, held[0], None)
        receivers = [
            stack.enter_context(_peer("receive", directory / f"h{number}", host))
            for number, host in enumerate(found[1:])
        ]
        relays = [r.ask({"way": "address"})["address"] for r in receivers]
        raw = _measure("raw", first, addresses, source, receivers[:1])
        one = _measure("stream", first, addresses, source, receivers[:1])
        star = _measure("stream", first, addresses, source, receivers)
        chain = _chain(first, addresses["stream"], receivers, relays)
        _offer(source, held[1], held[0])
        delta = _chain(second, addresses["stream"], receivers, relays)
    link_s = one.wall_s
    figures["links"] = {
        "bytes": LINK_BYTES,
        "link_mb_per_s": LINK_BYTES_PER_S / 1e6,
        "raw_sockets_to_1_s": raw.wall_s,
        "stream_to_1_s": link_s,
        "star_to_8_link_times": star.wall_s / link_s,
        "chain_to_8_link_times": chain["wall_s"] / link_s,
        "chain_to_8_gb_per_s": LINK_BYTES * len(receivers) / 1e9 / chain["wall_s"],
        "chain_delta_to_8_s": delta["wall_s"],
        "chain_delta_bytes_per_receiver": delta["received_bytes"],
    }
    ratio = LINK_BYTES / delta["received_bytes"]
    return [
        at_most("chain to 8 receivers", chain["wall_s"] / link_s, "link times", 2.0),
        at_least("delta on the wire of 1.1 % changed", ratio, "x", 70),
    ]


def _offer(source: Peer, manifest: Manifest, base: Manifest | None) -> dict[str, str]:
    """Have it served, raw and as a stream; says where."""
    order = {
        "do": "version",
        "manifest": manifest.model_dump(),
        "base": base.model_dump() if base else None,
    }
    return source.ask(order)


def _chain(
    manifest: Manifest, origin: str, receivers: Sequence[Peer], relays: Sequence[str]
) -> dict[str, Any]:
    for number, receiver in enumerate(receivers):
        sources = [*relays[number - 1 : number], origin]
        order = {"way": "mirror", "manifest": manifest.model_dump(), "sources": sources}
        receiver.order(order)
    took = [receiver.answer() for receiver in receivers]
    return {
        "wall_s": max(t["wall_s"] for t in took),
        "received_bytes": max(t["received_bytes"] for t in took),
    }


def _elsewhere(manifest: Manifest) -> Manifest:
    return manifest.model_copy(update={"segment": "/elsewhere/segment"})


# ── files and processes ──────────────────────────────────────────────────────────────────────────


def _segment(path: Path, length: int) -> Path:
    """A safetensors file of bfloat16 weights."""
    weights = np.random.default_rng(0).normal(0, 0.02, length // 2).astype(np.float32)
    content = (weights.view(np.uint32) >> 16).astype(np.uint16)
    header = json.dumps(
        {"w": {"dtype": "BF16", "shape": [length // 2], "data_offsets": [0, length]}}
    ).encode()
    header += b" " * (-(len(header) + 8) % 64)
    path.write_bytes(len(header).to_bytes(8, "little") + header + content.tobytes())
    return path


def _step_after(old: Path, new: Path) -> None:
    """Move some elements by one unit in the last place, as a step does."""
    content = bytearray(old.read_bytes())
    start = len(content) % CHUNK_BYTES
    items = np.frombuffer(content, np.uint16, offset=start)
    dice = np.random.default_rng(1)
    moved = dice.random(items.size) < CHANGED_SHARE
    items[moved] += dice.choice(np.array([1, 65535], np.uint16), int(moved.sum()))
    new.write_bytes(content)


@contextmanager
def _peer(role: str, directory: Path, host: Host | None = None) -> Generator[Peer]:
    directory.mkdir(exist_ok=True)
    address = host.address if host else LOCALHOST
    command = [sys.executable, "-m", "services.cli.bench_weights_peers"]
    command += [role, str(directory), address]
    with _child(host.command(*command) if host else command) as process:
        yield Peer(process)
        assert process.stdin
        process.stdin.close()
        process.wait(CHILD_TIMEOUT_S)


@contextmanager
def _child(command: list[str]) -> "Generator[subprocess.Popen[str]]":
    with subprocess.Popen(  # noqa: S603  (our own modules)
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()
