"""`libra simulate …`: scheduling policies in virtual time."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from common.blas import use_one_thread
from common.errors import ConfigError
from services.cli.bench import BenchReport


def simulate(  # noqa: PLR0913  (one parameter for each option)
    *,
    workload: Annotated[str, typer.Option(help="A model of trajectories, or trace.")] = "",
    policy: Annotated[str, typer.Option(help="One policy.")] = "",
    compare: Annotated[str, typer.Option(help="P1,P2,… or all: on the same seeds.")] = "",
    dial: Annotated[str, typer.Option(help="S1,S2,…: compare at these outcome strengths.")] = "",
    experiment: Annotated[str, typer.Option(help="An acceptance experiment by its id.")] = "",
    trace: Annotated[str, typer.Option(help="JSONL file to replay.")] = "",
    strength: Annotated[
        float | None, typer.Option(help="Share of residual variance that outcomes explain.")
    ] = None,
    scale: Annotated[float, typer.Option(help="Multiplies all lengths.")] = 1.0,
    cluster: Annotated[str, typer.Option(help="Which workers there are.")] = "paper",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 8,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each policy.")] = 5,
    processes: Annotated[int, typer.Option(min=0, help="Runs at a time; 0 takes all cores.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Picture to write: .png, .svg, .pdf.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object with figures and checks.")
    ] = False,
) -> None:
    """Judge scheduling policies in virtual time, with the code that schedules real runs."""
    use_one_thread()
    from services.cli import simulate as simulations
    from services.cli.simulate_plots import check_plot
    from services.simulator.runs import RunSpec

    check_together(
        {
            "--policy": policy,
            "--compare": compare,
            "--dial": dial,
            "--experiment": experiment,
            "--workload": workload,
            "--trace": trace,
            "--strength": strength,
            "--plot": plot,
        }
    )
    if experiment:
        report = simulations.run_experiment(experiment, seeds=seeds)
        if not as_json:
            report.print_table()
            raise typer.Exit(report.exit_code)
        _finish(report, as_json=as_json)
    check_plot(plot)
    spec = RunSpec(
        workload=workload or (simulations.TRACE if trace else "search-r1"),
        policy=policy,
        trace=trace,
        strength=strength,
        scale=scale,
        cluster=cluster,
        steps=steps,
    )
    asked = simulations.Asked(spec, seeds, processes or _cores(), plot)
    simulations.check_spec(spec)
    if dial:
        policies = simulations.parse_policies("--compare", compare or "all")
        done = simulations.simulate_dial(asked, policies, simulations.parse_strengths(dial))
    elif compare:
        policies = simulations.parse_policies("--compare", compare)
        done = simulations.simulate_compare(asked, policies)
    elif policy:
        simulations.parse_policies("--policy", policy)
        done = simulations.simulate_one(asked)
    else:
        raise ConfigError("give --policy P, --compare P1,P2,…, --dial S1,S2,… or --experiment ID")
    if not as_json:
        simulations.print_tables(done.comparisons)
    _finish(done.report, as_json=as_json)


def check_together(options: Mapping[str, object]) -> None:
    """Refuse options that would change nothing beside others.

    Args:
        options: what was given for each; None or empty where nothing was.

    Raises:
        ConfigError: naming both.
    """
    given = [name for name, value in options.items() if value is not None and value != ""]
    if "--experiment" in given and len(given) > 1:
        rest = ", ".join(name for name in given if name != "--experiment")
        raise ConfigError(f"--experiment: brings all that it needs; drop {rest}")
    for way in ("--compare", "--dial"):
        if way in given and "--policy" in given:
            raise ConfigError(f"--policy: runs one policy; drop it or {way}")
    if "--dial" in given and "--strength" in given:
        raise ConfigError("--strength: --dial sets it; drop one of them")


def _finish(report: BenchReport, *, as_json: bool) -> None:
    if as_json:
        print(report.to_json())
    else:
        report.print_checks()
    raise typer.Exit(report.exit_code)


def _cores() -> int:
    return len(os.sched_getaffinity(0))
