"""`libra bench predictor`: how well the tokens to come are foreseen, on recordings.

At each routing point, a tool return that is followed by more generation, every estimate is asked
first and learns later, when the trajectory has finished. Two protocols:

- *sequential*: one trajectory after the other, in the order of the file;
- *concurrent*: so many trajectories live at once, each turn takes as long as it samples tokens,
  the trajectories of a group start together, and nothing is learned of one before it finished.

R² is of log(1 + tokens still to come). The predictor's estimate of it is the mean logarithm over
the distribution that it gives, because that is the estimate which the square error asks for; P50
and P90 are those that it reports to the policies. Speeds are CPU time per routing point, without
what playing the recording costs by itself.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import log1p
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import ConfigError
from services.cli.bench import BenchReport, Check, at_most
from services.cli.bench_predictor_baselines import Estimator, baselines
from services.scheduler.predictor.residual import ResidualPredictor
from services.scheduler.routing.outcomes import PayloadSizes, ToolOutcome
from services.scheduler.routing.route import Route
from services.simulator.traces import TraceTrajectory, read_traces

LIVE = 64
CALIBRATION_MAX = 0.05
QUERY_US_MAX = 6.0
UPDATE_US_MAX = 8.0
SPEED_EVENTS_MIN = 20_000
"""A recording is repeated until it has so many: what is measured is the steady state. All events
count, not routing points alone, of which a recording may have hardly any."""
SPEED_ROUNDS = 3
"""The fastest counts: others use the machine, too."""
PLOTTED_R2_MIN = -1.0
"""With few rows, R² can be so far below 0 that nothing else could be seen."""
HALVES = ("whole", "second_half")
_SIZES = PayloadSizes()


class Event(NamedTuple):
    """Something happens to a trajectory of the recording."""

    place: int
    turn: int
    """That has finished; -1 when the trajectory begins. The last one ends it."""


def sequential(trajectories: Sequence[TraceTrajectory]) -> Iterator[Event]:
    """One after the other."""
    for index, trajectory in enumerate(trajectories):
        for turn in range(-1, len(trajectory.turns)):
            yield Event(index, turn)


def concurrent(trajectories: Sequence[TraceTrajectory], live_max: int) -> Iterator[Event]:
    """Whole groups start while at most `live_max` live; a larger one starts by itself."""
    groups: dict[str, list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.group_id, []).append(index)
    waiting = deque(groups.values())
    running: list[tuple[int, int, int]] = []
    now = 0
    while waiting or running:
        while waiting and (not running or len(running) + len(waiting[0]) <= live_max):
            for index in waiting.popleft():
                yield Event(index, -1)
                heappush(running, (now + trajectories[index].turns[0].output_tokens, index, 0))
        now, index, turn = heappop(running)
        turns = trajectories[index].turns
        yield Event(index, turn)
        if turn + 1 < len(turns):
            heappush(running, (now + turns[turn + 1].output_tokens, index, turn + 1))


def steps(
    trajectories: Sequence[TraceTrajectory], events: Iterable[Event]
) -> Iterator[tuple[Route, int, int]]:
    """Each event with the trajectory's route at that time.

    Yields:
        The route, the event's turn (-1: begins; -2: ended), and the tokens still to come.
    """
    routes: dict[int, Route] = {}
    totals: dict[int, int] = {}  # A trajectory sums its turns each time that it is asked.
    for place, turn in events:
        trajectory = trajectories[place]
        if turn < 0:
            totals[place] = trajectory.output_tokens
            group = trajectory.group_id
            route = Route(trajectory.trajectory_id, group, group, trajectory.prompt_tokens)
            routes[place] = route
            yield route, -1, totals[place]
        elif turn == len(trajectory.turns) - 1:
            route = routes.pop(place)
            route.action_tokens += trajectory.turns[turn].output_tokens
            yield route, -2, 0
        else:
            route, done = routes[place], trajectory.turns[turn]
            assert done.status is not None, "only the last turn ends without a tool call"
            tokens = done.observation_tokens
            outcome = ToolOutcome(
                done.tool, done.status, _SIZES.class_of(tokens), tokens, done.latency_s or 0.0
            )
            route.returned(outcome, action_tokens=done.output_tokens, observation_tokens=tokens)
            yield route, turn, totals[place] - route.action_tokens


@dataclass
class Expected:
    """What was expected at each routing point, and what came."""

    actual: list[float] = field(default_factory=list[float])
    """Logarithms, as are `ours` and the baselines' estimates."""
    ours: list[float] = field(default_factory=list[float])
    within_p50: list[bool] = field(default_factory=list[bool])
    within_p90: list[bool] = field(default_factory=list[bool])
    baselines: dict[str, list[list[float]]] = field(default_factory=dict[str, list[list[float]]])
    """By name and setting."""


def play(trajectories: Sequence[TraceTrajectory], events: Iterable[Event]) -> Expected:
    """Ask first, learn later."""
    predictor, others = ResidualPredictor(), baselines()
    expected = Expected(baselines={name: [[] for _ in each] for name, each in others.items()})
    for route, turn, remaining in steps(trajectories, events):
        if turn == -1:
            predictor.begin(route)
        elif turn == -2:
            predictor.end(route, finished=True)
            for settings in others.values():
                for estimator in settings:
                    estimator.learn(route)
        else:
            predictor.returned(route)
            if remaining > 0:
                _ask(expected, predictor, others, route, remaining)
    return expected


def _ask(
    expected: Expected,
    predictor: ResidualPredictor,
    others: dict[str, list[Estimator]],
    route: Route,
    remaining: int,
) -> None:
    residual = predictor.predict(route)
    values = predictor.distribution(route)
    expected.actual.append(log1p(remaining))
    expected.ours.append(sum(map(log1p, values)) / len(values))
    expected.within_p50.append(remaining <= residual.p50)
    expected.within_p90.append(remaining <= residual.p90)
    for name, settings in others.items():
        for estimator, estimates in zip(settings, expected.baselines[name], strict=True):
            estimates.append(estimator.expect(route))


def r2(estimates: Sequence[float], actual: Sequence[float]) -> float:
    """Share of the variance that is explained; 0 where there is none."""
    if not actual:
        return 0.0
    mean = sum(actual) / len(actual)
    variance = sum((value - mean) ** 2 for value in actual)
    pairs = zip(estimates, actual, strict=True)
    missed = sum((estimate - value) ** 2 for estimate, value in pairs)
    return 1.0 - missed / variance if variance > 0 else 0.0


def judge(expected: Expected) -> dict[str, dict[str, float]]:
    """R² of all, and calibration, over the whole and over the second half of the points."""
    judged: dict[str, dict[str, float]] = {}
    for half, start in zip(HALVES, (0, len(expected.actual) // 2), strict=True):
        actual = expected.actual[start:]
        found = {"r2": r2(expected.ours[start:], actual)}
        for name, settings in expected.baselines.items():
            found[f"r2_{name}"] = max(r2(each[start:], actual) for each in settings)
        count = max(1, len(actual))
        found["within_p50"] = sum(expected.within_p50[start:]) / count
        found["within_p90"] = sum(expected.within_p90[start:]) / count
        judged[half] = found
    return judged


def speed_rounds(events: int) -> int:
    """How often a recording of so many events is repeated."""
    return -(-SPEED_EVENTS_MIN // events)


def speeds(trajectories: Sequence[TraceTrajectory], live_max: int) -> dict[str, float]:
    """CPU time of a query and of all updates per routing point, in the concurrent protocol.

    An update is also counted per call: each trajectory begins, has its returns, and ends.
    """
    events = list(concurrent(trajectories, live_max))
    points = sum(len(trajectory.turns) - 1 for trajectory in trajectories)
    rounds = speed_rounds(len(events))
    idle, updating, asking = (
        min(
            _seconds(trajectories, events, rounds, ResidualPredictor() if told else None, ask=ask)
            for _ in range(SPEED_ROUNDS)
        )
        for told, ask in ((False, False), (True, False), (True, True))
    )
    update, query = 1e6 * (updating - idle) / rounds, 1e6 * (asking - updating) / rounds
    calls = points + 2 * len(trajectories)
    return {
        "update_us": update / points,
        "update_call_us": update / calls,
        "query_us": query / points,
    }


def _seconds(
    trajectories: Sequence[TraceTrajectory],
    events: Sequence[Event],
    rounds: int,
    predictor: ResidualPredictor | None,
    *,
    ask: bool,
) -> float:
    spent = 0.0
    # The first round, in which everything is new, is not measured.
    for number in range(rounds + 1):
        began = time.process_time()
        for route, turn, _ in steps(trajectories, events):
            if predictor is None:
                continue
            if turn == -1:
                predictor.begin(route)
            elif turn == -2:
                predictor.end(route, finished=True)
            else:
                predictor.returned(route)
                if ask:
                    predictor.predict(route)
        spent += time.process_time() - began if number else 0.0
    return spent


def read_all(paths: Sequence[Path]) -> dict[str, list[TraceTrajectory]]:
    """Recordings by name: that of the file, or its path where two files are named alike.

    Raises:
        ConfigError: one cannot be read, is given twice, or has nothing to be foreseen.
    """
    if len(set(paths)) < len(paths):
        raise ConfigError("--trace: a recording is given twice; give each once")
    stems = [path.stem for path in paths]
    recordings: dict[str, list[TraceTrajectory]] = {}
    for path in paths:
        trajectories = read_traces(path)
        if all(len(trajectory.turns) == 1 for trajectory in trajectories):
            raise ConfigError(
                f"{path}: no tool return is followed by another turn, so there is nothing to "
                "foresee; give a recording of several turns"
            )
        recordings[path.stem if stems.count(path.stem) == 1 else str(path)] = trajectories
    return recordings


def bench_predictor(
    *, traces: Sequence[Path], live: int = LIVE, plot: Path | None = None
) -> BenchReport:
    """Judge the predictor on recordings, in both protocols.

    Raises:
        ConfigError: a recording cannot be read, is given twice, or has nothing to be foreseen.
    """
    figures: dict[str, dict[str, Any]] = {}
    checks: list[Check] = []
    for name, trajectories in read_all(traces).items():
        protocols = {
            "sequential": sequential(trajectories),
            "concurrent": concurrent(trajectories, live),
        }
        found: dict[str, Any] = {}
        for protocol, events in protocols.items():
            expected = play(trajectories, events)
            found["points"] = len(expected.actual)
            found[protocol] = judge(expected)
            checks.extend(_checks(f"{name}, {protocol}", found[protocol]))
        found["speed"] = speed = speeds(trajectories, live)
        checks.append(at_most(f"query, {name}", speed["query_us"], "us", QUERY_US_MAX))
        checks.append(at_most(f"update, {name}", speed["update_us"], "us", UPDATE_US_MAX))
        figures[name] = {"trajectories": len(trajectories)} | found
    if plot is not None:
        draw(figures, plot)
    return BenchReport("predictor", dict(figures), checks)


def _checks(where: str, judged: dict[str, dict[str, float]]) -> Iterator[Check]:
    for half, found in judged.items():
        other, best = max(
            ((name[3:], value) for name, value in found.items() if name.startswith("r2_")),
            key=lambda each: each[1],
        )
        name = f"{where}, {half}: R² against the best other ({other})"
        yield Check(name, found["r2"], "", f"> {best:.3f}", found["r2"] > best)
        for level in (50, 90):
            off = abs(found[f"within_p{level}"] - level / 100)
            yield at_most(f"{where}, {half}: P{level} is off by", off, "", CALIBRATION_MAX)


def draw(figures: dict[str, dict[str, Any]], path: Path) -> None:
    """R² of all on the second half, one panel per protocol. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(5 + 2 * len(figures), 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(2, 1, sharex=True)
    for axes, protocol in zip(panels, ("sequential", "concurrent"), strict=True):
        seconds = [found[protocol]["second_half"] for found in figures.values()]
        draw_bars(axes, seconds)
        axes.set_ylabel(f"R², {protocol}")
        axes.set_xticks(range(len(figures)), list(figures))
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.grid(alpha=0.25, axis="y")
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(
        "log(1 + tokens still to come),\nsecond half of each recording", fontsize="medium"
    )
    figure.savefig(str(path), dpi=120)


def draw_bars(axes: Any, seconds: Sequence[dict[str, float]]) -> None:
    """A cluster of bars for each recording; what is far below 0 is cut off and says its value."""
    names = [name for name in seconds[0] if name.startswith("r2")]
    width = 1 / (len(names) + 1)
    for place, name in enumerate(names):
        at = [trace + (place - len(names) / 2) * width for trace in range(len(seconds))]
        heights = [max(PLOTTED_R2_MIN, found[name]) for found in seconds]
        label = name[3:].replace("_", " ") or "libra"
        axes.bar(at, heights, 0.9 * width, label=label, align="edge")
        for left, found in zip(at, seconds, strict=True):
            if found[name] < PLOTTED_R2_MIN:
                middle = left + 0.45 * width
                text = f" {found[name]:.3g}"
                axes.text(middle, PLOTTED_R2_MIN, text, ha="center", va="bottom", rotation=90)
