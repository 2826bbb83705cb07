"""Real services on the simulated network: one process of a run per `process(…)` block."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from common.config import (
    BucketConfig,
    Config,
    ModelConfig,
    RunConfig,
    TasksConfig,
    ToolServerConfig,
)
from common.mesh import Mesh
from common.messages.coordinator import Manifest
from common.service import Runtime, Service
from common.transport.sim import SimNetwork

COORDINATOR = "sim://coordinator"
SEEDS_AT_EVERY_CHECK = 3


def seeds(many: int) -> range:
    """Seeds of a scenario: a few at every check, all of them in `scripts/soak`."""
    soak = os.environ.get("HYPOTHESIS_PROFILE") == "soak"
    return range(many if soak else min(many, SEEDS_AT_EVERY_CHECK))


def manifest(version: int, segment: str = "sim:nothing") -> Manifest:
    """A version without tensors, that only fake engines can apply."""
    return Manifest(
        version=version,
        segment=segment,
        length=0,
        chunk_bytes=1,
        chunks=[],
        digest=f"digest-{version}",
        tensors=[],
    )


async def describe(version: int, segment: str) -> Manifest:
    """What a coordinator in a simulation says of any segment."""
    return manifest(version, segment)


def sim_config(**sections: object) -> Config:
    """A small job; whole sections may be replaced."""
    values: dict[str, object] = {
        "run": RunConfig(name="sim", max_steps=4),
        "model": ModelConfig(path="m", context_tokens=64),
        "tasks": TasksConfig(path="t.jsonl"),
        "buckets": [BucketConfig(name="short")],
        "tools": [ToolServerConfig(name="tools", target="x")],
    }
    return Config.model_validate(values | sections)


@contextlib.asynccontextmanager
async def process(
    network: SimNetwork,
    role: str,
    name: str,
    *,
    config: Config | None = None,
    run_dir: Path = Path("/nonexistent"),
    incarnation: int = 1,
) -> AsyncGenerator[Runtime]:
    """One process: its mesh is entered, its service is the caller's to run."""
    address = COORDINATOR if role == "coordinator" else ""
    identity = f"sim/{role}/{name}/{incarnation:04d}"
    async with Mesh(network.connect(identity, address)) as mesh:
        yield Runtime(
            config=config or sim_config(),
            run_id="sim",
            run_dir=run_dir,
            role=role,
            name=name,
            mesh=mesh,
            coordinator_address=lambda: COORDINATOR,
            pid=incarnation,
        )


@contextlib.asynccontextmanager
async def serving(
    network: SimNetwork,
    role: str,
    name: str,
    build: Callable[[Runtime], Service],
    **options: object,
) -> AsyncGenerator[Runtime]:
    """Run a service beside the block and stop it at its end."""
    stopping = asyncio.Event()
    async with (
        process(network, role, name, **options) as runtime,  # type: ignore[arg-type]
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(build(runtime).run(stopping), name=f"{role} {name}")
        try:
            yield runtime
        finally:
            stopping.set()


async def until(reached: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for a state that nothing announces. Looking every 10 ms of virtual time is free."""
    async with asyncio.timeout(timeout_s):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
