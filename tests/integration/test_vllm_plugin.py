"""The tie between vLLM's child processes and their parent, without vLLM."""

import os
import select
import subprocess
import sys

CHILD = (
    "import os, signal\n"
    "from services.rollout.vllm_plugin import die_with\n"
    "die_with(os.getppid())\n"
    "print(os.getpid(), flush=True)\n"
    "signal.pause()\n"
)
PARENT = (
    "import subprocess, sys\n"
    f"child = subprocess.Popen([sys.executable, '-c', {CHILD!r}])\n"
    "child.wait()\n"
)
DEADLINE_MS = 10_000


def test_a_child_dies_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.kill()
            poll = select.poll()
            poll.register(child, select.POLLIN)
            assert poll.poll(DEADLINE_MS), "the child outlived its parent"
        finally:
            os.close(child)


def test_a_child_whose_parent_is_gone_already_dies_at_once() -> None:
    code = "from services.rollout.vllm_plugin import die_with; die_with(1 << 22)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
