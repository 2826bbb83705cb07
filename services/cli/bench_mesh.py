"""`libra bench mesh`: what a call costs, against raw pyzmq, zmq.asyncio and grpc.aio.

Each way to call has two processes on loopback, one that serves and one that calls, all started
before the first measurement. The rounds are interleaved: every round measures every way at every
concurrency for a slice of the time, so that a disturbance of the machine meets all of them. The
cost is the CPU time of both processes with all their threads (ZeroMQ's and gRPC's own included),
divided by the calls; CPU time, because the wall clock belongs to whoever else uses the machine.

Reported are medians over the rounds. Each ratio is the median of the rounds' own ratios and is
taken between measurements of the same concurrency:

- `transport / raw` at 1 and at 64 outstanding, both sides carrying the same 300 opaque bytes. The
  raw side is the same pair of socket types in a blocking loop without any event loop; it sends
  each frame by itself, while the transport packs what one loop turn has into one frame.
- `asyncio / mesh` and `grpc / mesh` at 64 outstanding. All three encode, decode and validate the
  same messages with the same codec on the same kind of event loop. Only the mesh also keeps
  deadlines, budgets and call ids against repetition.

At 1 outstanding both processes go to sleep and are woken for every call. That is the kernel's
work: raw blocking pyzmq pays it too, and a large part of every figure is this constant. So the
last two ratios are shown for 1 as well, but the limits are set for 64, where the code is measured.
"""

import json
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import product
from statistics import median
from typing import Any, cast

from common.errors import ConfigError
from services.cli.bench import BenchReport, at_least, at_most

WAYS = ("raw", "transport", "mesh", "asyncio", "grpc")
OUTSTANDING = (1, 64)
ROUNDS = 7
WARM_UP_S = 0.1
STOP_TIMEOUT_S = 5.0


@dataclass
class Pair:
    """The two processes of one way, and what was measured."""

    server: "subprocess.Popen[str]"
    caller: "subprocess.Popen[str]"
    cpu_us: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """Per call, by outstanding calls, one for each round."""
    calls_per_s: dict[int, list[float]] = field(default_factory=dict[int, list[float]])

    def measure(self, outstanding: int, seconds: float) -> None:
        """Let them talk for a while."""
        cpu, began = self._cpu_s(), time.perf_counter()
        calls = self._order(outstanding, seconds)
        cpu, elapsed = self._cpu_s() - cpu, time.perf_counter() - began
        self.cpu_us.setdefault(outstanding, []).append(cpu / calls * 1e6)
        self.calls_per_s.setdefault(outstanding, []).append(calls / elapsed)

    def warm_up(self) -> None:
        """Let caches fill and connections open."""
        self._order(OUTSTANDING[-1], WARM_UP_S)

    def _order(self, outstanding: int, seconds: float) -> int:
        assert self.caller.stdin
        print(json.dumps({"outstanding": outstanding, "seconds": seconds}), file=self.caller.stdin)
        self.caller.stdin.flush()
        return cast("int", _hear(self.caller))

    def _cpu_s(self) -> float:
        return _process_cpu_s(self.server.pid) + _process_cpu_s(self.caller.pid)


def bench_mesh(*, seconds: float = 2.0) -> BenchReport:
    """Measure every way at every concurrency.

    Args:
        seconds: In all, for each way and concurrency.

    Raises:
        ConfigError: grpcio is missing.
    """
    if find_spec("grpc") is None:
        raise ConfigError("bench mesh: grpcio is not installed; install the `dev` extra")
    with ExitStack() as stack:
        pairs = {way: stack.enter_context(_pair(way)) for way in WAYS}
        for pair in pairs.values():
            pair.warm_up()
        for _, outstanding in product(range(ROUNDS), OUTSTANDING):
            for pair in pairs.values():
                pair.measure(outstanding, seconds / ROUNDS)
    return _report(pairs)


def _report(pairs: dict[str, Pair]) -> BenchReport:
    figures: dict[str, Any] = {
        f"outstanding_{outstanding}": {
            way: {
                "cpu_us_per_call": round(median(pair.cpu_us[outstanding]), 2),
                "calls_per_s": round(median(pair.calls_per_s[outstanding])),
            }
            for way, pair in pairs.items()
        }
        for outstanding in OUTSTANDING
    }

    def ratio(dear: str, cheap: str, outstanding: int) -> float:
        rounds = zip(pairs[dear].cpu_us[outstanding], pairs[cheap].cpu_us[outstanding], strict=True)
        return median(a / b for a, b in rounds)

    for dear, cheap in (("asyncio", "mesh"), ("grpc", "mesh"), ("asyncio", "raw")):
        figures["outstanding_1"][f"{dear} / {cheap}"] = round(ratio(dear, cheap, 1), 2)
    checks = [
        at_most("CPU transport / raw, 1 outstanding", ratio("transport", "raw", 1), "x", 2.5),
        at_most("CPU transport / raw, 64 outstanding", ratio("transport", "raw", 64), "x", 2.5),
        at_least("CPU asyncio / mesh, 64 outstanding", ratio("asyncio", "mesh", 64), "x", 4),
        at_least("CPU grpc / mesh, 64 outstanding", ratio("grpc", "mesh", 64), "x", 10),
    ]
    return BenchReport("mesh", figures, checks)


@contextmanager
def _pair(way: str) -> Generator[Pair]:
    with _peer("serve", way) as server, _peer("call", way, cast("str", _hear(server))) as caller:
        yield Pair(server, caller)


@contextmanager
def _peer(*arguments: str) -> "Generator[subprocess.Popen[str]]":
    command = [sys.executable, "-m", "services.cli.bench_mesh_peers", *arguments]
    with subprocess.Popen(  # noqa: S603  (our own module)
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            process.wait(STOP_TIMEOUT_S)


def _hear(process: "subprocess.Popen[str]") -> object:
    assert process.stdout
    line = process.stdout.readline()
    assert line, f"{process.args} ended"
    return json.loads(line)


def _process_cpu_s(pid: int) -> float:
    """CPU time of another process, all threads, in nanosecond resolution.

    Source: `clock_getcpuclockid(3)`; Linux makes the clock id of a process from its number.
    """
    return time.clock_gettime((~pid << 3) | 2)
