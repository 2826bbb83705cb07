"""The processes of the run that `bench_migrate` measures, and what they train."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator, Sequence
from pathlib import Path

import numpy as np

from common.config import Config
from common.errors import RunFailed
from common.identity import new_identity
from common.logs import last_lines
from common.membership import Membership
from common.mesh import Mesh
from common.messages.scheduler import GroupData, TrajectoryData, TurnData
from common.service import Runtime, bind_address, published_coordinator
from common.toml_write import to_toml
from common.trajectory import StopReason, pack_logprobs, pack_tokens
from common.transport.zmq import ZmqTransport
from services.cli.bench_onpolicy import CONTEXT_TOKENS, random_model
from services.cli.plan import ProcessSpec, common_environment, processes

QUIET, SWITCHING, BESIDE, STREAMING = "quiet", "switching", "beside", "streaming"
CONDITIONS = (QUIET, SWITCHING, BESIDE, STREAMING)
NEIGHBOURS = {"receiver": STREAMING, "bystander": BESIDE}
"""Processes that are no part of a run, and when they are busy."""
RUN = "bench-migrate"
RECEIVED = "received.json"
"""What the receiver has taken in."""
GROUPS, GROUP_SIZE = 16, 4
PROMPT_TOKENS, ACTION_TOKENS = 32, 64
"""4,096 trained tokens a step."""
MICRO_BATCH_TOKENS = 512
"""About a dozen micro-batches a step: enough to share, as in a larger job."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] }}:{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Rollout workers refuse a model without one; nothing is sampled."""
STOP_S = 30.0
LOG_LINES = 12


def make_config(folder: Path, cores: Sequence[int]) -> Config:
    """A tiny random model, one worker that stays and one slot that changes sides."""
    model = random_model(folder / "model", tied=True)
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "tasks.jsonl").touch()
    bucket = {"engine": "torch", "slots": 4, "kv_tokens": 1024, "cpus": [[cores[-1]]]}
    return Config.model_validate(
        {
            "run": {"name": RUN, "directory": str(folder), "max_steps": 1_000_000},
            "model": {"path": str(model), "context_tokens": CONTEXT_TOKENS},
            "tasks": {"path": str(folder / "tasks.jsonl")},
            "buckets": [
                {"name": "stays", **bucket},
                {"name": "moves", "hybrid": True, **bucket},
            ],
            "training": {
                "groups_per_step": GROUPS,
                "group_size": GROUP_SIZE,
                "micro_batch_tokens": MICRO_BATCH_TOKENS,
                "learning_rate": 1e-5,
                "checkpoint_every_steps": 1_000_000,
            },
            "rollout": {"tool_format": "tags"},
            "tools": [{"name": "none", "target": "none"}],
            "elastic": {"planner": False, "train_slots": 0},
        }
    )


def prepared_batch() -> dict[str, GroupData]:
    """Sequences of one length, so that every micro-batch costs the same."""
    rng = np.random.default_rng(0)

    def trajectory(name: str, prompt: bytes, reward: float) -> TrajectoryData:
        turn = TurnData(
            action_tokens=pack_tokens(rng.integers(1, 250, ACTION_TOKENS).tolist()),
            action_logprobs=pack_logprobs([-5.5] * ACTION_TOKENS),
            action_versions=pack_tokens([0] * ACTION_TOKENS),
            observation_tokens=b"",
            tool_status=None,
        )
        return TrajectoryData(
            trajectory_id=name,
            prompt_tokens=prompt,
            turns=[turn],
            stop_reason=StopReason.ANSWERED,
            reward=reward,
            failure=None,
        )

    groups: dict[str, GroupData] = {}
    for number in range(GROUPS):
        name = f"g{number}"
        prompt = pack_tokens(rng.integers(1, 250, PROMPT_TOKENS).tolist())
        trajectories = [trajectory(f"{name}.{n}", prompt, n % 2) for n in range(GROUP_SIZE)]
        groups[name] = GroupData(group_id=name, task_id=name, trajectories=trajectories)
    return groups


@contextlib.asynccontextmanager
async def join(
    config: Config, run_dir: Path, role: str, name: str, labels: dict[str, str] | None = None
) -> AsyncGenerator[tuple[Mesh, Membership]]:
    """Be a member of the run within the block."""

    def address() -> str:
        return published_coordinator(run_dir, RUN) or config.coordinator.address

    identity = str(new_identity(RUN, role, name))
    async with Mesh(ZmqTransport(identity, bind_address(address(), local=True))) as mesh:
        membership = Membership(Runtime(config, RUN, run_dir, role, name, mesh, address), labels)
        async with asyncio.TaskGroup() as tasks:
            member = tasks.create_task(membership.run(), name="membership")
            yield mesh, membership
            member.cancel()


@contextlib.contextmanager
def on_cores(*cores: int) -> Generator[None]:
    """The block and its children run on these cores, all threads of the children included."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Stage:
    """The processes of the run, the trainer on a core of its own."""

    def __init__(self, config: Config, folder: Path, cores: Sequence[int]) -> None:
        self._config = config
        self.run_dir = folder / RUN
        """Where the configuration lies."""
        self.run_dir.mkdir()
        (self.run_dir / "config.toml").write_text(to_toml(config))
        self._cores = cores
        self._running: dict[str, subprocess.Popen[str]] = {}

    def start(self) -> None:
        """Start all but the scheduler and the tool servers."""
        for spec in processes(self._config):
            if spec.role not in ("scheduler", "tools"):
                core = self._cores[0] if spec.role == "trainer" else self._cores[-1]
                with on_cores(core):
                    self._running[spec.label] = self._spawn(spec)
        with on_cores(self._cores[-1]):
            for neighbour in NEIGHBOURS:
                self._running[neighbour] = self._spawn_neighbour(neighbour)

    def order(self, neighbour: str, order: str) -> None:
        """`go` or `stop`."""
        pipe = self._running[neighbour].stdin
        assert pipe is not None
        print(order, file=pipe, flush=True)

    def check(self) -> None:
        """Raise when a process has ended."""
        for name, process in self._running.items():
            code = process.poll()
            if code is not None and not (name == "trainer" and code == 0):
                raise RunFailed(f"{name} ended with code {code}:\n{self._tail(name)}")

    def stop(self) -> None:
        """End them: neighbours at the end of their orders, the others when told."""
        for name, process in reversed(self._running.items()):
            if name not in NEIGHBOURS:
                process.terminate()
            elif process.stdin is not None:
                process.stdin.close()
        for process in self._running.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)

    @property
    def received(self) -> dict[str, float]:
        """What the receiver took in, after `stop`; empty when there was nothing to take."""
        path = self.run_dir / RECEIVED
        return json.loads(path.read_text()) if path.exists() else {}

    def _spawn(self, spec: ProcessSpec) -> "subprocess.Popen[str]":
        command = [
            *(sys.executable, "-m", spec.module),
            *("--config", str(self.run_dir / "config.toml")),
            *("--name", spec.name, "--run-dir", str(self.run_dir), "--run-id", RUN),
            *("--parent", str(os.getpid())),
        ]
        return self._popen(command, spec.label, dict(spec.environment))

    def _spawn_neighbour(self, name: str) -> "subprocess.Popen[str]":
        module = f"services.cli.bench_migrate_{name}"
        command = [sys.executable, "-m", module, str(self.run_dir), str(os.getpid())]
        return self._popen(command, name, {"OMP_NUM_THREADS": "1"})

    def _popen(
        self, command: list[str], name: str, environment: dict[str, str]
    ) -> "subprocess.Popen[str]":
        inherited = common_environment(os.environ, self.run_dir)
        with self._log(name).open("ab") as output:
            return subprocess.Popen(  # noqa: S603  (our own modules)
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**inherited, **environment},
                text=True,
            )

    def _log(self, name: str) -> Path:
        return self.run_dir / f"{name}.log"

    def _tail(self, name: str) -> str:
        return "\n".join(last_lines(self._log(name), LOG_LINES))
