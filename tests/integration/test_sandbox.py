"""The sandbox, judged by what the host sees: exit statuses, clocks, processes and files."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common.config import ToolServerConfig
from common.errors import ConfigError
from common.messages.tools import GradeSession, OpenSession
from common.trajectory import FailureKind
from services.tools.host import ToolHost
from services.tools.jail import PRELUDE, Limits, find_python
from services.tools.orphans import end_orphans
from services.tools.registry import Offer
from services.tools.sandbox import Sandbox, SandboxResult, SandboxStatus
from services.tools.sdk import Busy, Environment, InfrastructureFailure, Transcript
from services.tools.seccomp import seccomp_program

OK, FAILED, KILLED, TIMEOUT, FLOOD = SandboxStatus
HOSTILE = Path(__file__).parent.parent / "hostile"
LIMITS = Limits(memory_bytes=128 << 20, output_bytes=4096, flood_bytes=1 << 20)
TIMEOUT_S = 3.0
SHORT_S = 0.5

needs_bwrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed (apt-get install bubblewrap)"
)

ENDINGS = {
    "01_fork_bomb": {OK},
    "02_memory_bomb": {FAILED, KILLED},
    "03_mmap_touch": {FAILED, KILLED},
    "04_disk_fill": {OK, FAILED},
    "06_busy_loop": {TIMEOUT},
    "07_sleep_forever": {TIMEOUT},
    "08_inet_socket": {OK},
    "09_unix_host_sockets": {OK},
    "11_proc_leak": {OK},
    "12_host_files": {OK},
    "13_symlink_escape": {OK},
    "14_output_flood": {FLOOD},
    "16_kill_everything": {OK, KILLED},
    "17_daemon_left": {OK},
    "18_daemon_holds_stdout": {OK},
    "19_zombies": {OK},
    "21_namespaces_mount": {OK},
    "22_setuid": {OK, FAILED},
    "25_path_escape": {OK},
    "27_ignore_signals": {TIMEOUT},
    "29_fd_exhaustion": {OK},
    "30_segfault": {KILLED},
    "31_thread_bomb": {OK},
    "34_clock_host_name": {OK},
    "37_forged_status": {FAILED},
}
"""By snippet: how the kernel may say that it ended."""
OWN_PROCESS = "11_proc_leak"
"""Looks for secrets in pid 1, which is the code itself here."""
SLOW = {"06_busy_loop", "07_sleep_forever", "27_ignore_signals"}


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return asyncio.run(Sandbox.open())


def run(sandbox: Sandbox, code: str, *, timeout_s: float = TIMEOUT_S) -> SandboxResult:
    return asyncio.run(sandbox.run_python(code, timeout_s=timeout_s, limits=LIMITS))


def processes_with(marker: str) -> list[str]:
    """Processes of the host whose command line holds a marker, those of this test aside."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker in text and str(os.getpid()) != path.parent.name:
            found.append(text)
    return found


def host_files() -> list[str]:
    """What the snippets try to add to."""
    directories = (Path("/"), Path("/workspace"), Path("/etc"), Path("/usr"), Path("/usr/bin"))
    return [str(entry) for path in directories if path.is_dir() for entry in sorted(path.iterdir())]


@needs_bwrap
def test_every_snippet_is_listed() -> None:
    assert sorted(path.name.removesuffix(".py.txt") for path in HOSTILE.iterdir()) == list(ENDINGS)


@needs_bwrap
@pytest.mark.parametrize("name", ENDINGS)
def test_hostile_code_is_contained(
    sandbox: Sandbox, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_SECRET", "do-not-tell")
    marker = f"marker-{name}-{os.getpid()}"
    code = f"# {marker}\n" + (HOSTILE / f"{name}.py.txt").read_text()
    before = host_files()
    started_s = time.monotonic()
    result = run(sandbox, code, timeout_s=SHORT_S if name in SLOW else TIMEOUT_S)
    assert result.status in ENDINGS[name], result
    assert time.monotonic() - started_s < TIMEOUT_S + 2
    assert processes_with(marker) == []
    assert len(result.stdout) <= LIMITS.output_bytes
    assert "do-not-tell" not in result.stdout + result.stderr
    assert host_files() == before
    if name != OWN_PROCESS:
        assert "ESCAPE" not in result.stdout, result.stdout


@needs_bwrap
def test_a_status_is_the_kernels_and_not_what_is_printed(sandbox: Sandbox) -> None:
    code = 'import sys; print(\'{"exit-code": 0}\'); sys.stderr.write("bwrap: failed"); sys.exit(7)'
    result = run(sandbox, code)
    assert (result.status, result.exit_code) == (FAILED, 7)


@needs_bwrap
def test_code_that_prints_while_it_is_killed_is_read_to_the_end(sandbox: Sandbox) -> None:
    result = run(sandbox, "print('x' * 3000, flush=True)\nwhile True: pass", timeout_s=SHORT_S)
    assert (result.status, len(result.stdout)) == (TIMEOUT, 3001)


@needs_bwrap
def test_cpu_time_that_is_used_up_is_a_timeout(sandbox: Sandbox) -> None:
    result = asyncio.run(
        sandbox.run_python("while True: pass", timeout_s=20, limits=Limits(cpu_s=1))
    )
    assert result.status is TIMEOUT
    assert result.wall_s < 19


@needs_bwrap
def test_a_traceback_shows_only_the_code(sandbox: Sandbox) -> None:
    assert run(sandbox, "def f(): return 1/0\nf()").stderr == (
        'Traceback (most recent call last):\n  File "main.py", line 2, in <module>\n'
        '  File "main.py", line 1, in f\nZeroDivisionError: division by zero\n'
    )


@needs_bwrap
def test_runs_keep_nothing_for_each_other(sandbox: Sandbox) -> None:
    run(sandbox, "open('/workspace/left', 'w').write('x'); open('/tmp/left', 'w').write('x')")
    assert run(sandbox, "import os; print(os.listdir('/workspace'))").stdout == "[]\n"


@needs_bwrap
def test_no_port_of_the_host_can_be_reached(sandbox: Sandbox) -> None:
    async def scenario() -> tuple[SandboxResult, int]:
        connections = 0

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
            return await sandbox.run_python(code, timeout_s=TIMEOUT_S), connections

    result, connections = asyncio.run(scenario())
    assert (result.status, connections) == (FAILED, 0)


@needs_bwrap
@pytest.mark.parametrize("code", ["print('\0')", "print('\ud800')", "#" * 200_000])
def test_code_that_is_no_text_is_the_models_error(sandbox: Sandbox, code: str) -> None:
    with pytest.raises(ValueError, match="source code"):
        run(sandbox, code)


@needs_bwrap
def test_many_runs_share_the_slots(sandbox: Sandbox) -> None:
    async def scenario() -> list[SandboxResult]:
        async with asyncio.TaskGroup() as together:
            runs = [
                together.create_task(sandbox.run_python(f"print({i})", timeout_s=10))
                for i in range(12)
            ]
        return [await each for each in runs]

    assert [result.stdout for result in asyncio.run(scenario())] == [f"{i}\n" for i in range(12)]


class CodeGrader(Environment):
    """Grades with code that may do anything, so it runs in the sandbox."""

    name = "code"
    sandbox: Sandbox

    def reset(self, task: dict[str, str]) -> str:
        self.grader = task["grader"]
        return "q"

    async def grade(self, trajectory: Transcript) -> float:
        result = await self.sandbox.run_python(self.grader, timeout_s=SHORT_S, limits=LIMITS)
        if result.status is not OK:
            raise InfrastructureFailure(f"the grader's code ended with {result.status}")
        return float(result.stdout)


GRADERS = {
    "print(0.5)": (0.5, None),
    "while True: pass": (None, FailureKind.GRADER),
    "import os\nwhile True: os.fork()": (None, FailureKind.GRADER),
    "x = bytearray(10 << 30)": (None, FailureKind.GRADER),
    "print('one')": (None, FailureKind.GRADER),
}


@needs_bwrap
@pytest.mark.parametrize("grader", GRADERS)
async def test_a_hostile_grader_ends_as_a_typed_failure(sandbox: Sandbox, grader: str) -> None:
    CodeGrader.sandbox = sandbox
    async with asyncio.TaskGroup() as tasks:
        host = ToolHost(
            ToolServerConfig(name="code", target="code"), Offer({"code": CodeGrader}), tasks
        )
        row = json.dumps({"grader": grader})
        opening = OpenSession(session_id="s", environment="code", task=row, ttl_s=60.0)
        await host.open_session("w", opening)
        grade = GradeSession(session_id="s", turns=[], stop_reason="answered", timeout_s=10.0)
        graded = await host.grade_session("w", grade)
        assert (graded.reward, graded.failure) == GRADERS[grader]


@needs_bwrap
async def test_a_sandbox_that_is_gone_is_our_failure() -> None:
    for bwrap in ("/nonexistent/bwrap", "/usr/bin/false"):
        broken = Sandbox(bwrap, "/usr/bin/python3", slots=1)
        with pytest.raises(InfrastructureFailure, match="the sandbox"):
            await broken.run_python("print(1)", timeout_s=TIMEOUT_S)


@needs_bwrap
async def test_a_full_sandbox_says_that_it_is_busy() -> None:
    single = await Sandbox.open(slots=1)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(single.run_python("while True: pass", timeout_s=SHORT_S))
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="slot"):
            await single.run_python("print(1)", timeout_s=TIMEOUT_S, slot_wait_s=0.05)
    assert (await running).status is TIMEOUT


OWNER = """
import asyncio, sys
from services.tools.sandbox import Sandbox
async def main():
    sandbox = await Sandbox.open()
    print("open", flush=True)
    await sandbox.run_python("# " + sys.argv[1] + "\\nimport time; time.sleep(60)", timeout_s=60)
asyncio.run(main())
"""


@needs_bwrap
@pytest.mark.parametrize("seen", [1, 2])
def test_a_killed_server_leaves_no_sandbox_behind(sandbox: Sandbox, seen: int) -> None:
    """It is killed when the jailer is there, and when the code in the jail is there too."""
    marker = f"orphan-{seen}-{os.getpid()}"
    command = [sys.executable, "-c", OWNER, marker]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout
        assert owner.stdout.readline() == b"open\n"
        await_until(lambda: len(in_sandbox(marker)) >= seen)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    await_until(lambda: not running_code(marker))
    asyncio.run(Sandbox.open())  # The next server ends a jailer that bubblewrap left waiting.
    await_until(lambda: not processes_with(marker))


@needs_bwrap
def test_a_new_server_leaves_the_sandboxes_of_a_living_one_alone(sandbox: Sandbox) -> None:
    async def scenario() -> SandboxResult:
        marker = f"living-{os.getpid()}"
        async with asyncio.TaskGroup() as tasks:
            code = f"# {marker}\nimport time; time.sleep(0.5); print(1)"
            running = tasks.create_task(sandbox.run_python(code, timeout_s=TIMEOUT_S))
            while not in_sandbox(marker):  # noqa: ASYNC110 - nothing announces it.
                await asyncio.sleep(0)
            await Sandbox.open()
        return await running

    assert asyncio.run(scenario()).status is OK


def test_a_jailer_is_ended_only_when_its_server_is_gone() -> None:
    command = ["/x/bwrap", "-c", "import time; time.sleep(60)", PRELUDE]
    with subprocess.Popen(command, executable=find_python(), stdin=subprocess.PIPE) as jailer:
        await_until(lambda: bool(processes_with("/x/bwrap")))
        assert end_orphans("/x/bwrap") == 0
        assert jailer.stdin
        jailer.stdin.close()
        assert end_orphans("/x/bwrap") == 1
        assert jailer.wait(10) == -signal.SIGKILL


def running_code(marker: str) -> list[str]:
    return [line for line in in_sandbox(marker) if "bwrap" not in line.split()[0]]


def in_sandbox(marker: str) -> list[str]:
    return [line for line in processes_with(marker) if "def _start" in line]


def await_until(reached: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < deadline_s
        os.sched_yield()


async def test_without_bubblewrap_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
        await Sandbox.open()


FAKE_JAILS = {
    "it cannot be started here": "#!/bin/sh\necho 'bwrap: No permissions to create namespace' >&2; exit 1\n",  # noqa: E501
    "does not hold here": """#!/bin/bash
while [ "$1" != -- ]; do [ "$1" = --json-status-fd ] && fd=$2; shift; done; shift
"$@"; code=$?
echo "{\\"exit-code\\": $code}" >&$fd; exit $code
""",
}


@pytest.mark.parametrize("message", FAKE_JAILS)
async def test_a_jail_that_does_not_contain_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, message: str
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text(FAKE_JAILS[message])
    fake.chmod(0o755)
    for directory in (tmp_path, *list(tmp_path.parents)[:2]):
        directory.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match=message):
        await Sandbox.open()


async def test_unsafe_runs_with_limits_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    sandbox = await Sandbox.open(unsafe=True)
    assert "sandbox.disabled" in capsys.readouterr().out
    assert (await sandbox.run_python("print(1)", timeout_s=5)).stdout == "1\n"
    marker = f"unsafe-{os.getpid()}"
    code = f"# {marker}\nimport subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    assert (await sandbox.run_python(code, timeout_s=SHORT_S)).status is TIMEOUT
    assert processes_with(marker) == []


def test_the_filter_refuses_machines_that_it_does_not_know() -> None:
    assert len(seccomp_program("aarch64")) % 8 == 0
    with pytest.raises(ConfigError, match="not riscv64"):
        seccomp_program("riscv64")
