"""`libra bench …`: every claim about speed or numerics, as a command."""

from pathlib import Path
from typing import Annotated

import typer

from common.blas import use_one_thread
from services.cli.bench import BenchReport

bench = typer.Typer(help="Measure, and check against the limits.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object with figures and checks.")]


@bench.command()
def mesh(
    *,
    as_json: AsJson = False,
    seconds: Annotated[float, typer.Option(help="Per measurement.")] = 2.0,
) -> None:
    """The mesh against raw pyzmq, zmq.asyncio and grpc.aio."""
    from services.cli.bench_mesh import bench_mesh

    _finish(bench_mesh(seconds=seconds), as_json=as_json)


@bench.command()
def onpolicy(
    *,
    as_json: AsJson = False,
    engine: Annotated[list[str] | None, typer.Option(help="torch, vllm; both by default.")] = None,
) -> None:
    """Trainer and engine log-probabilities of the same tokens: ratio 1 within 1e-3."""
    from services.cli.bench_onpolicy import bench_onpolicy

    _finish(bench_onpolicy(engines=engine or ["torch", "vllm"]), as_json=as_json)


@bench.command()
def overlap(
    *,
    as_json: AsJson = False,
    config: Annotated[Path, typer.Option(help="The job.")] = Path("configs/demo/demo.toml"),
    steps: Annotated[int, typer.Option(min=5, help="Of each run.")] = 13,
    rounds: Annotated[int, typer.Option(min=1, help="Of mesh and single loop.")] = 2,
) -> None:
    """The mesh against a single-process loop of the same model and engine."""
    from services.cli.bench_overlap import bench_overlap

    _finish(bench_overlap(config=config, steps=steps, rounds=rounds), as_json=as_json)


@bench.command()
def migrate(
    *,
    as_json: AsJson = False,
    rounds: Annotated[int, typer.Option(min=1, help="Of all conditions.")] = 8,
    steps: Annotated[int, typer.Option(min=4, help="Counted, of each condition.")] = 15,
    every: Annotated[int, typer.Option(min=1, help="Steps between two changes of side.")] = 4,
) -> None:
    """Whether the training loop notices workers that change sides, and weights that stream."""
    use_one_thread()
    from services.cli.bench_migrate import bench_migrate

    _finish(bench_migrate(rounds=rounds, block_steps=steps, switch_every=every), as_json=as_json)


@bench.command()
def weights(*, as_json: AsJson = False) -> None:
    """Weights between processes and hosts: speed, cost, deltas, chains."""
    use_one_thread()
    from services.cli.bench_weights import bench_weights

    _finish(bench_weights(), as_json=as_json)


@bench.command()
def scheduler(*, as_json: AsJson = False) -> None:
    """Routing decisions per second and core, over whole trajectories, and memory."""
    use_one_thread()
    from services.cli.bench_scheduler import bench_scheduler

    _finish(bench_scheduler(), as_json=as_json)


@bench.command()
def predictor(
    *,
    as_json: AsJson = False,
    trace: Annotated[list[Path], typer.Option(help="A recording; give it again for more.")],
    live: Annotated[int, typer.Option(min=1, help="Trajectories at a time.")] = 64,
    plot: Annotated[Path | None, typer.Option(help="Draw R² into this file.")] = None,
) -> None:
    """How well the tokens still to come are foreseen, on recordings."""
    use_one_thread()
    from services.cli.bench_predictor import bench_predictor
    from services.cli.simulate_plots import check_plot

    check_plot(plot)
    _finish(bench_predictor(traces=trace, live=live, plot=plot), as_json=as_json)


@bench.command()
def replicas(
    *,
    as_json: AsJson = False,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 20,
    workers: Annotated[int, typer.Option(min=1, help="Replica processes.")] = 2,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the trainer.")] = 1,
    seed: Annotated[int, typer.Option(help="Of what befalls the replicas.")] = 0,
) -> None:
    """Steps with replicas that come, go, stall and die equal the steps without."""
    use_one_thread()
    from services.cli.bench_replicas import bench_replicas

    _finish(bench_replicas(steps=steps, replicas=workers, ranks=ranks, seed=seed), as_json=as_json)


def _finish(report: BenchReport, *, as_json: bool) -> None:
    if as_json:
        print(report.to_json())
    else:
        report.print_table()
    raise typer.Exit(report.exit_code)
