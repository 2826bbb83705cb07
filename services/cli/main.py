"""The command line: `libra run | serve | check | scale | why | simulate | bench`."""

import importlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from common.blas import use_one_thread
from common.errors import ConfigError, LibraError
from common.logs import configure_logs
from common.service import EXIT_CONFIG, EXIT_FAILED
from common.service import main as serve_main
from services.cli.bench_commands import bench
from services.cli.simulate_commands import simulate

SERVICES = {
    "coordinator": ("services.coordinator.service", "streaming"),
    "replica": ("services.trainer.replica", "ReplicaService"),
    "rollout": ("services.rollout.service", "mirroring"),
    "scheduler": ("services.scheduler.service", "SchedulerService"),
    "tools": ("services.tools.service", "ToolsService"),
    "trainer": ("services.trainer.service", "TrainerService"),
}
"""Of each role, the module and what builds the service of a process."""

app = typer.Typer(
    help="Reinforcement learning of tool-using language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.command()(simulate)

ConfigPath = Annotated[Path, typer.Argument(help="The job's TOML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, as in the file.", show_default=False)
]


@app.command()
def run(
    config: ConfigPath,
    overrides: Overrides = None,
    *,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint.")] = False,
    max_steps: Annotated[int | None, typer.Option(help="Short for run.max_steps=N.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Check, print the plan, start nothing.")] = False,
) -> None:
    """Run a job on this machine: all its processes, to its end."""
    from services.cli.check import check_job
    from services.cli.launcher import SteadyConsole, launch
    from services.cli.plan import processes

    configure_logs("launcher", "launcher", level="WARNING")
    given = list(overrides or [])
    if max_steps is not None:
        given.append(f"run.max_steps={max_steps}")
    console = SteadyConsole(highlight=False)
    checked = check_job(config, given)
    if dry_run:
        for spec in processes(checked):
            console.print(f"{spec.role:12} {spec.name}")
        return
    raise typer.Exit(launch(checked, resume=resume, console=console))


@app.command()
def check(config: ConfigPath, overrides: Overrides = None) -> None:
    """Say everything that is wrong with a job before anything starts."""
    from services.cli.check import check_job

    check_job(config, list(overrides or []))
    print(f"{config}: ok")


@app.command()
def why(
    trajectory: Annotated[str, typer.Argument(help="Its id, the beginning of it, or a group's.")],
    *,
    run: Annotated[Path | None, typer.Option(help="Run directory; the newest by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """Tell why a trajectory ran where it ran, and what it waits for."""
    from services.cli.why import why as tell_why

    tell_why(trajectory, run, as_json=as_json)


@app.command()
def scale(
    *,
    train: Annotated[int | None, typer.Option(help="Hybrid slots that are to train.")] = None,
    rollout: Annotated[int | None, typer.Option(help="Those that are to roll out.")] = None,
    run: Annotated[Path | None, typer.Option(help="Run directory; the newest by default.")] = None,
    hold: Annotated[float, typer.Option(help="So long the planner may not change it, s.")] = 600.0,
    timeout: Annotated[float, typer.Option(help="Stop waiting for it after so long, s.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="The outcome as JSON.")] = False,
) -> None:
    """Set how many hybrid slots train; without numbers, show where they stand."""
    from services.cli.scale import Wanted
    from services.cli.scale import scale as set_split

    if (train is None) != (rollout is None):
        raise ConfigError("scale: give both --train and --rollout, or none of them")
    wanted = None
    if train is not None and rollout is not None:
        wanted = Wanted(train, rollout, hold, timeout)
    set_split(run, wanted, as_json=as_json)


@app.command(context_settings={"ignore_unknown_options": True})
def serve(
    service: Annotated[str, typer.Argument(help=f"One of {', '.join(sorted(SERVICES))}.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="--config FILE [--name N] [--run-id ID] [section.key=value …]"),
    ] = None,
) -> None:
    """Run one process of a job; what compose and systemd call."""
    if service not in SERVICES:
        raise ConfigError(f"serve: no service {service!r}; one of {', '.join(sorted(SERVICES))}")
    if service == "scheduler":
        use_one_thread()
    module, name = SERVICES[service]
    build = getattr(importlib.import_module(module), name)
    raise typer.Exit(serve_main(service, build, arguments or []))


def main() -> None:
    """Entry point of the `libra` command: exit 2 for the user's mistakes, 1 for failures."""
    try:
        app()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    except LibraError as error:
        print(f"libra: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
