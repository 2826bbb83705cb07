"""`libra simulate …`: scheduling policies in virtual time."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from common.blas import use_one_thread
from common.errors import ConfigError
from services.cli.bench import BenchReport

# What there is, for --help: to look it up where it is defined would import the simulator.
WORKLOADS = "search-r1, dapo, dapo-shrink, r2e or trace"
POLICIES = "libra, cmlfq, la_mlfq, length_aware, mlfq, least_load, round_robin or oracle"
CLUSTERS = "paper or node"
EXPERIMENTS = "A0, A1, A2 or A8"

# None or empty where nothing was given: what is given beside an experiment is refused.
Workload = Annotated[str, typer.Option(help=f"{WORKLOADS}.", show_default="search-r1")]
OnePolicy = Annotated[str, typer.Option(help=f"One policy: {POLICIES}.")]
Compare = Annotated[str, typer.Option(help="P1,P2,… or all: on the same seeds.")]
Dial = Annotated[str, typer.Option(help="S1,S2,…: compare at these outcome strengths.")]
AnExperiment = Annotated[str, typer.Option(help=f"An acceptance experiment: {EXPERIMENTS}.")]
Trace = Annotated[str, typer.Option(help="JSONL file to replay; alone, with policy libra.")]
Strength = Annotated[
    float | None, typer.Option(help="Share of residual variance that outcomes explain.")
]
Scale = Annotated[float | None, typer.Option(help="Multiplies all lengths.", show_default="1")]
Cluster = Annotated[str, typer.Option(help=f"{CLUSTERS}.", show_default="paper")]
Steps = Annotated[int | None, typer.Option(min=1, help="Optimizer steps.", show_default="8")]
Seeds = Annotated[int, typer.Option(min=1, help="Runs of each policy.")]
Processes = Annotated[
    int | None, typer.Option(min=0, help="Runs at a time; 0 takes all cores.", show_default="0")
]
Plot = Annotated[Path | None, typer.Option(help="Picture to write: .png, .svg, .pdf.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object with figures and checks.")]


def simulate(  # noqa: PLR0913  (one parameter for each option)
    *,
    workload: Workload = "",
    policy: OnePolicy = "",
    compare: Compare = "",
    dial: Dial = "",
    experiment: AnExperiment = "",
    trace: Trace = "",
    strength: Strength = None,
    scale: Scale = None,
    cluster: Cluster = "",
    steps: Steps = None,
    seeds: Seeds = 5,
    processes: Processes = None,
    plot: Plot = None,
    as_json: Json = False,
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
            "--scale": scale,
            "--cluster": cluster,
            "--steps": steps,
            "--processes": processes,
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
        policy=policy or ("" if compare or dial or not trace else simulations.LIBRA),
        trace=trace,
        strength=strength,
        scale=1.0 if scale is None else scale,
        cluster=cluster or "paper",
        steps=steps or 8,
    )
    done = simulations.simulate_asked(
        simulations.Asked(spec, seeds, processes or _cores(), plot), compare=compare, dial=dial
    )
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
    for option in ("--strength", "--dial"):
        if option in given and "--trace" in given:
            raise ConfigError(
                f"{option}: a recording says itself what its outcomes tell; drop it or --trace"
            )
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
