"""What `libra simulate` does: check what is asked for, play it, and say what came out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from common.config_load import did_you_mean
from common.errors import ConfigError
from services.cli.bench import BenchReport, Check, at_least, at_most
from services.cli.simulate_plots import plot_bars, plot_curves
from services.cli.simulate_progress import Bar
from services.scheduler.routing.policies import POLICIES
from services.simulator.cluster import CLUSTERS
from services.simulator.compare import LIBRA, SHOWN, Comparison, Spread
from services.simulator.experiments import EXPERIMENTS
from services.simulator.measures import RunResult
from services.simulator.runs import RunSpec, play_all, seeds_of
from services.simulator.workload_presets import PAPER_LIKE, PRESETS
from services.simulator.world import ORACLE

TRACE = "trace"
"""The workload that replays a file."""
EVENTS_PER_S_MIN = 50_000.0
EVENTS_MEASURED_MIN = 100_000
"""Of a run whose rate is judged: two seconds at the limit, which a default run exceeds. In a
shorter one the first events, which fill tables, and whatever else the machine does, decide."""
BEHIND_MAX = 0.03
"""Of throughput, to the best other policy, on any workload."""
OF_ORACLE_MIN = 0.90
MOVED_MAX = 0.15
"""Of tokens, on `MOVED_WORKLOAD`: the limit was stated for it alone."""
MOVED_WORKLOAD = "search-r1"
PLOTTED = ("tokens/s", "p99 s", "moved", "routed right")
PIPED_COLUMNS = 160
PERCENT = 100
RANGED = ("tokens/s", "makespan s", "p99 s")
"""Columns that show the range where the terminal is wide enough; the JSON has all ranges."""
SHARES = ("moved", "routed right")


@dataclass(frozen=True, slots=True)
class Asked:
    """The options that several ways to simulate share."""

    spec: RunSpec
    seeds: int
    processes: int
    plot: Path | None


def policy_names() -> list[str]:
    """All that can be simulated."""
    return [*POLICIES, ORACLE]


def parse_policies(option: str, given: str) -> list[str]:
    """The policies of a comma-separated list, or all of them for `all`.

    Raises:
        ConfigError: one does not exist, or is named twice.
    """
    names = policy_names() if given == "all" else [name.strip() for name in given.split(",")]
    known = ", ".join(policy_names())
    unknown = [name for name in names if name not in policy_names()]
    if unknown:
        hint = did_you_mean(unknown[0], known)
        raise ConfigError(f"{option}: no policy {unknown[0]!r}{hint}; take all, or some of {known}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{option}: a policy is named twice; name each once")
    return names


def parse_strengths(given: str) -> list[float]:
    """The outcome strengths of `--dial`.

    Raises:
        ConfigError: one is no number between 0 and 1, or is named twice.
    """
    strengths: list[float] = []
    for part in given.split(","):
        try:
            strengths.append(float(part))
        except ValueError:
            raise ConfigError(f"--dial: {part!r} is no number; write 0.02,0.2,0.6") from None
    for strength in strengths:
        check_strength("--dial", strength)
    if len(set(strengths)) < len(strengths):
        raise ConfigError("--dial: a strength is named twice; name each once")
    return strengths


def check_strength(option: str, strength: float) -> None:
    """Refuse what is no share.

    Raises:
        ConfigError: it is outside of 0 to 1.
    """
    if not 0.0 <= strength < 1.0:
        raise ConfigError(f"{option}: {strength:g} is no share of variance; give 0 to 0.99")


def check_spec(spec: RunSpec) -> None:
    """Refuse a run that cannot be played.

    Raises:
        ConfigError: naming the option and what to do, a line for each problem.
    """
    problems: list[str] = []
    if spec.workload not in {*PRESETS, TRACE}:
        known = ", ".join([*PRESETS, TRACE])
        problems.append(f"--workload: no workload {spec.workload!r}; one of {known}")
    if spec.cluster not in CLUSTERS:
        known = ", ".join(CLUSTERS)
        problems.append(f"--cluster: no cluster {spec.cluster!r}; one of {known}")
    if spec.workload == TRACE and not spec.trace:
        problems.append("--workload trace: needs --trace FILE")
    if spec.trace and spec.workload != TRACE:
        problems.append(f"--trace: replays a file, and {spec.workload} does not; drop one of them")
    if spec.trace and not Path(spec.trace).is_file():
        problems.append(f"--trace: {spec.trace} is no file; give a JSONL trace")
    if not 0 < spec.scale < inf:
        problems.append(f"--scale: {spec.scale:g} is no factor; 1 leaves lengths as they are")
    if problems:
        raise ConfigError(*problems)
    if spec.strength is not None:
        check_strength("--strength", spec.strength)
    replace(spec, policy=LIBRA).build()  # A trace that cannot be read shows here.


class Simulated(NamedTuple):
    """What came out, for scripts and for people."""

    report: BenchReport
    comparisons: list[tuple[str, Comparison]]
    """Each under its title."""


def simulate_asked(asked: Asked, *, compare: str, dial: str) -> Simulated:
    """Check what is asked for, and play it.

    Raises:
        ConfigError: something cannot be played, or nothing is asked for.
    """
    check_spec(asked.spec)
    if dial:
        policies = parse_policies("--compare", compare or "all")
        return simulate_dial(asked, policies, parse_strengths(dial))
    if compare:
        return simulate_compare(asked, parse_policies("--compare", compare))
    if asked.spec.policy:
        parse_policies("--policy", asked.spec.policy)
        return simulate_one(asked)
    raise ConfigError(
        "give --policy P, --compare P1,P2,…, --dial S1,S2,…, --trace FILE or --experiment ID"
    )


def simulate_one(asked: Asked) -> Simulated:
    """One policy on all seeds."""
    specs = seeds_of(asked.spec, [asked.spec.policy], asked.seeds)
    results = _play(asked, specs)
    comparison = Comparison.of(results)
    figures = _asked_figures(asked) | comparison.figures()
    _plot(asked, comparison)
    report = BenchReport(f"simulate {asked.spec.policy}", figures, rate_checks(results))
    return Simulated(report, [(_title(asked), comparison)])


def rate_checks(results: Sequence[RunResult]) -> list[Check]:
    """Whether the simulator is fast, if a run was long enough to tell."""
    rates = [run.events_per_s for run in results if run.events >= EVENTS_MEASURED_MIN]
    if not rates:
        return []
    return [at_least("events per second on one core", median(rates), "1/s", EVENTS_PER_S_MIN)]


def simulate_compare(asked: Asked, policies: Sequence[str]) -> Simulated:
    """Several policies on the same seeds."""
    comparison = Comparison.of(_play(asked, seeds_of(asked.spec, policies, asked.seeds)))
    _plot(asked, comparison)
    figures = _asked_figures(asked) | comparison.figures()
    checks = comparison_checks(comparison, asked.spec)
    report = BenchReport("simulate compare", figures, checks)
    return Simulated(report, [(_title(asked), comparison)])


def comparison_checks(comparison: Comparison, spec: RunSpec) -> list[Check]:
    """What must hold of `libra`: nowhere far behind, and ahead where outcomes decide lengths."""
    if LIBRA not in comparison.policies:
        return []
    checks: list[Check] = []
    paper_like = is_paper_like(spec)
    best = comparison.best_other()
    if best is not None:
        ratio, limit = comparison.ratio(LIBRA, best).median, 1.0 if paper_like else 1 - BEHIND_MAX
        checks.append(at_least(f"libra / {best} (the best other)", ratio, "ratio", limit))
    if not paper_like:
        return checks
    if ORACLE in comparison.policies:
        ratio = comparison.ratio(LIBRA, ORACLE).median
        checks.append(at_least("libra / oracle", ratio, "ratio", OF_ORACLE_MIN))
    if spec.workload == MOVED_WORKLOAD:
        moved = comparison.spread(LIBRA, SHOWN["moved"]).median
        checks.append(at_most("tokens that libra moved", moved, "share", MOVED_MAX))
    return checks


def is_paper_like(spec: RunSpec) -> bool:
    """Whether outcomes decide lengths as in what was published."""
    return not spec.trace and spec.strength in {None, PAPER_LIKE}


def simulate_dial(asked: Asked, policies: Sequence[str], strengths: Sequence[float]) -> Simulated:
    """The comparison at several outcome strengths, as a curve."""
    specs = [
        spec
        for strength in strengths
        for spec in seeds_of(replace(asked.spec, strength=strength), policies, asked.seeds)
    ]
    results = _play(asked, specs)
    each = len(policies) * asked.seeds
    points = [
        Comparison.of(results[place * each : (place + 1) * each]) for place in range(len(strengths))
    ]
    if asked.plot is not None:
        curves = {
            policy: [point.spread(policy, SHOWN["tokens/s"]) for point in points]
            for policy in policies
        }
        plot_curves(asked.plot, _title(asked), strengths, curves, y="tokens per second")
    figures = _asked_figures(asked)
    checks: list[Check] = []
    titled: list[tuple[str, Comparison]] = []
    for strength, point in zip(strengths, points, strict=True):
        titled.append((f"outcome strength {strength:g}", point))
        figures[f"strength {strength:g}"] = point.figures()
        checks += [
            replace(check, name=f"at {strength:g}: {check.name}")
            for check in comparison_checks(point, replace(asked.spec, strength=strength))
        ]
    return Simulated(BenchReport("simulate dial", figures, checks), titled)


def run_experiment(name: str, *, seeds: int) -> BenchReport:
    """One acceptance experiment.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in EXPERIMENTS:
        raise ConfigError(f"--experiment: no experiment {name!r}; one of {', '.join(EXPERIMENTS)}")
    with Bar(PERCENT) as bar:
        result = EXPERIMENTS[name](range(seeds), lambda share: bar.at(share * PERCENT, name))
    checks = [
        Check(c.name, c.value, c.unit, f"{c.low:g} to {c.high:g}", c.ok) for c in result.checks
    ]
    return BenchReport(f"experiment {result.name}", result.figures, checks)


def print_tables(comparisons: Sequence[tuple[str, Comparison]]) -> None:
    """For people: a row for each policy, medians with their ranges."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    for title, comparison in comparisons:
        console.print(_table(title, comparison, ranged=console.width >= PIPED_COLUMNS))


def _table(title: str, comparison: Comparison, *, ranged: bool) -> Table:
    table = Table(title=title, box=None, padding=(0, 1), title_justify="left")
    table.add_column("policy", no_wrap=True)
    columns = comparison.columns()
    for name in columns:
        table.add_column(name, justify="right")
    for policy in comparison.policies:
        spreads = {name: comparison.spread(policy, value) for name, value in columns.items()}
        cells = [_cell(name, spread, ranged=ranged) for name, spread in spreads.items()]
        table.add_row(policy, *cells)
    return table


def _cell(name: str, spread: Spread, *, ranged: bool) -> str:
    share = name in SHARES or name.startswith("idle ")
    median, low, high = (_number(value, share=share) for value in spread)
    if not ranged or name not in RANGED or low == high:
        return median
    return f"{median} [dim]{low} … {high}[/dim]"


def _number(value: float, *, share: bool) -> str:
    if share:
        return f"{value:.1%}" if value < 0.1 else f"{value:.0%}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _plot(asked: Asked, comparison: Comparison) -> None:
    if asked.plot is None:
        return
    panels = {
        name: {policy: comparison.spread(policy, SHOWN[name]) for policy in comparison.policies}
        for name in PLOTTED
    }
    plot_bars(asked.plot, _title(asked), panels)


def _play(asked: Asked, specs: list[RunSpec]) -> list[RunResult]:
    with Bar(len(specs)) as bar:
        return play_all(specs, processes=asked.processes, on_done=bar.run_done)


def _asked_figures(asked: Asked) -> dict[str, Any]:
    spec = asked.spec
    return {
        "workload": spec.trace or spec.workload,
        "cluster": spec.cluster,
        "strength": spec.strength,
        "scale": spec.scale,
        "steps": spec.steps,
        "seeds": asked.seeds,
    }


def _title(asked: Asked) -> str:
    spec = asked.spec
    name = Path(spec.trace).stem if spec.trace else spec.workload
    strength = "" if spec.strength is None else f", outcome strength {spec.strength:g}"
    seeds = "1 seed" if asked.seeds == 1 else f"{asked.seeds} seeds"
    return f"{name}{strength}: cluster {spec.cluster}, {spec.steps} steps, {seeds}"
