"""Builders for tests of routing: fleets, routes, tool returns, and a predictor that is told."""

from collections.abc import Mapping

from common.messages.scheduler import ReportWorker
from common.trajectory import ToolStatus
from common.weights import version_id
from services.scheduler.routing.fleet import BucketShape, Fleet, Terms
from services.scheduler.routing.outcomes import PayloadSizes, ToolOutcome
from services.scheduler.routing.policy import Decision, Policy, TurnMeasure
from services.scheduler.routing.route import Residual, Route

SHORT = BucketShape("short", 1, 5000, 50_000)
LONG = BucketShape("long", 4, 50_000, 500_000)
SIZES = PayloadSizes()


class ToldPredictor:
    """Predicts what it is told to, by trajectory id; counts what it hears."""

    def __init__(self, residuals: Mapping[str, float] | None = None, default: float = 500) -> None:
        self.residuals = dict(residuals or {})
        self.default = default
        self.begun: list[str] = []
        self.ended: list[tuple[str, bool]] = []

    def begin(self, route: Route) -> None:
        self.begun.append(route.trajectory_id)

    def predict(self, route: Route, *, tokens_since_return: int = 0) -> Residual:
        tokens = self.residuals.get(route.trajectory_id, self.default)
        return Residual(tokens, tokens, tokens, 1.0)

    def returned(self, route: Route) -> None:
        pass

    def end(self, route: Route, *, finished: bool) -> None:
        self.ended.append((route.trajectory_id, finished))

    def dump(self) -> bytes:
        return b"told"

    def load(self, dumped: bytes) -> None:
        assert dumped == b"told"


def fleet_of(
    workers: Mapping[str, int] | None = None,
    *,
    buckets: tuple[BucketShape, ...] = (SHORT, LONG),
    slots: int = 64,
    tokens_expected: int = 1000,
) -> Fleet:
    """So many workers of each bucket, all of which have reported at time 0."""
    fleet = Fleet(buckets, tokens_expected)
    by_name = {bucket.name: bucket for bucket in buckets}
    for name, count in (workers or {bucket.name: 1 for bucket in buckets}).items():
        for number in range(count):
            report_in(fleet, by_name[name], number, slots=slots)
    return fleet


def report_in(
    fleet: Fleet, bucket: BucketShape, number: int, *, slots: int = 64, now: float = 0.0
) -> None:
    """One worker reports."""
    name = f"{bucket.name}-{number}"
    report = ReportWorker(
        bucket=bucket.name,
        version=version_id(0, 0),
        kv_tokens_used=0,
        kv_tokens_free=bucket.kv_tokens,
        slots=slots,
        holding=[],
        decode_tokens=0,
    )
    fleet.report(name, name, report, now)


def terms(now: float = 0.0) -> Terms:
    """Any worker that has reported will do."""
    return Terms(now=now, heard_since=0.0, lineage=0, oldest_step=0)


def route(trajectory_id: str, group_id: str = "", task_id: str = "", prompt: int = 0) -> Route:
    """A trajectory that has done nothing yet."""
    group_id = group_id or trajectory_id
    return Route(trajectory_id, group_id, task_id or group_id, prompt_tokens=prompt)


def outcome(
    tool: str = "search", tokens: int = 100, status: ToolStatus = ToolStatus.OK
) -> ToolOutcome:
    """A tool return."""
    return ToolOutcome(tool, status, SIZES.class_of(tokens), tokens, 0.5)


def turn(it: Route, action: int, returned: ToolOutcome, fleet: Fleet | None = None) -> None:
    """The trajectory has finished a turn."""
    it.returned(returned, action_tokens=action, observation_tokens=returned.payload_tokens)
    if fleet is not None:
        fleet.recount(it)


def follow(it: Route, decision: Decision, fleet: Fleet) -> None:
    """Carry a decision out as the book does."""
    it.residual = decision.residual
    it.kv_expected = max(decision.kv_expected, it.context_tokens)
    if decision.peer == it.worker:
        fleet.recount(it)
        return
    was = it.worker
    fleet.take(it)
    fleet.put(it, decision.peer)
    it.moves += bool(was) and not (was in fleet.workers and fleet.workers[was].draining)


def placed(
    policy: Policy, fleet: Fleet, trajectory_id: str, group_id: str = "", task_id: str = ""
) -> Route:
    """A new trajectory, begun and on the worker that the policy chose."""
    it = route(trajectory_id, group_id, task_id)
    policy.begin(it)
    decision = policy.place(it, fleet, terms())
    assert decision is not None
    follow(it, decision, fleet)
    return it


def learn(
    policy: Policy, task_id: str, turns: list[tuple[int, ToolOutcome]], last: int, name: str = ""
) -> None:
    """A whole trajectory ends by itself: its turns, and what its last turn sampled."""
    it = route(name or f"past-{task_id}", task_id=task_id)
    policy.begin(it)
    for action, returned in turns:
        turn(it, action, returned)
    it.action_tokens += last
    policy.end(it, finished=True)


def timed(
    policy: Policy,
    fleet: Fleet,
    bucket: str,
    step_s: float,
    *,
    request_s: float = 0.0,
    turns: int = 400,
) -> None:
    """The bucket's engine takes so long for a step, and more with each request in it."""
    policy.place(route("warm-up"), fleet, terms())
    for number in range(turns):
        running = 1 + number % 20
        policy.turn_measured(
            TurnMeasure(
                peer=f"{bucket}-0",
                bucket=bucket,
                prefill_tokens=0,
                action_tokens=101,
                queue_s=0.0,
                decode_s=100 * (step_s + request_s * running),
                running=running,
                kv_tokens_used=(number * 7919) % 20_000,
            )
        )
