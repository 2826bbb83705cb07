from services.scheduler.routing.fleet import BucketShape, Fleet, Worker
from services.scheduler.routing.libra import PATIENCE_S, Libra
from services.scheduler.routing.params import RoutingParams
from services.scheduler.routing.policy import Decision, MoveMeasure
from services.scheduler.routing.route import Residual, Route
from tests.support.routing import (
    LONG,
    SHORT,
    ToldPredictor,
    fleet_of,
    follow,
    outcome,
    placed,
    route,
    terms,
    timed,
    turn,
)


def libra(predictor: ToldPredictor | None = None, **params: float) -> Libra:
    return Libra(RoutingParams(**params), predictor or ToldPredictor())  # pyright: ignore[reportArgumentType]


def two_speeds(predictor: ToldPredictor, *, short_s: float, long_s: float) -> tuple[Libra, Fleet]:
    """A fleet of one worker per bucket whose engines take so long for a step."""
    policy, fleet = libra(predictor), fleet_of()
    timed(policy, fleet, "short", short_s)
    timed(policy, fleet, "long", long_s)
    return policy, fleet


def decide(policy: Libra, fleet: Fleet, it: Route) -> Decision:
    turn(it, 100, outcome(), fleet)
    decision = policy.returned(it, fleet, terms())
    assert decision is not None
    return decision


def on(fleet: Fleet, policy: Libra, peer: str, name: str = "t", prompt: int = 0) -> Route:
    it = route(name, prompt=prompt)
    policy.begin(it)
    fleet.put(it, peer)
    return it


def test_a_move_is_made_where_it_saves_more_than_it_costs() -> None:
    policy, fleet = two_speeds(ToldPredictor({"t": 4500}), short_s=0.02, long_s=0.01)
    decision = decide(policy, fleet, on(fleet, policy, "short-0"))
    assert (decision.peer, decision.reason) == ("long-0", "cheaper")
    assert [option.peer for option in decision.options] == ["long-0", "short-0"]
    assert decision.options[0].move_s > 0


def test_a_move_that_saves_less_than_the_margin_is_not_made() -> None:
    policy, fleet = two_speeds(ToldPredictor({"t": 4500}), short_s=0.0105, long_s=0.01)
    decision = decide(policy, fleet, on(fleet, policy, "short-0"))
    assert (decision.peer, decision.reason) == ("short-0", "margin")


def test_a_move_that_costs_what_it_saves_is_not_made() -> None:
    policy, fleet = two_speeds(ToldPredictor({"t": 1000}), short_s=0.02, long_s=0.01)
    for path in ("kv", "recompute"):
        for _ in range(20):
            policy.move_measured(MoveMeasure("short", "long", path, 1000, 50.0))
    it = on(fleet, policy, "short-0", prompt=15_000)
    decision = decide(policy, fleet, it)
    assert (decision.peer, decision.reason) == ("short-0", "best")
    turn(it, 0, outcome(tokens=5000), fleet)
    assert decide(policy, fleet, it).peer == "short-0"


def test_one_that_will_soon_be_done_stays() -> None:
    policy, fleet = two_speeds(ToldPredictor({"t": 3}), short_s=0.02, long_s=0.01)
    assert decide(policy, fleet, on(fleet, policy, "short-0", prompt=9000)).peer == "short-0"


def test_moves_of_one_trajectory_are_limited() -> None:
    policy, fleet = two_speeds(ToldPredictor({"t": 4500}), short_s=0.02, long_s=0.01)
    it = on(fleet, policy, "short-0")
    it.moves = RoutingParams().moves_max
    decision = decide(policy, fleet, it)
    assert (decision.peer, decision.reason) == ("short-0", "moves")


def test_a_new_one_goes_where_it_is_done_soonest() -> None:
    policy, fleet = two_speeds(ToldPredictor(), short_s=0.02, long_s=0.01)
    assert placed(policy, fleet, "t").worker == "long-0"


def test_equal_workers_share_the_work() -> None:
    policy, fleet = libra(), fleet_of({"short": 4})
    peers = [placed(policy, fleet, f"t{n}").worker for n in range(16)]
    assert sorted(peers) == sorted(f"short-{n % 4}" for n in range(16))


def test_siblings_prefer_the_worker_that_has_their_prompt() -> None:
    policy, fleet = libra(ToldPredictor(default=5)), fleet_of({"short": 2})
    policy.begin(route("s1", "g"))
    first = placed(policy, fleet, "s0", "g")
    first.prompt_tokens = 4000
    fleet.recount(first)
    decision = policy.place(route("s1", "g", prompt=4000), fleet, terms())
    assert decision is not None
    assert (decision.peer, decision.reason) == (first.worker, "sibling")


def test_a_worker_closes_when_its_cache_is_spoken_for_and_opens_when_it_has_emptied() -> None:
    small = BucketShape("small", 1, 0, 10_000)
    policy = libra(ToldPredictor(default=1000))
    fleet = fleet_of({"small": 1}, buckets=(small,))
    held: list[Route] = []
    while (decision := policy.place(route(f"t{len(held)}"), fleet, terms())) is not None:
        it = route(f"t{len(held)}")
        policy.begin(it)
        follow(it, decision, fleet)
        turn(it, 400, outcome(tokens=400), fleet)
        held.append(it)
        assert len(held) < 30
    worker = fleet.workers["small-0"]
    assert worker.context_tokens <= 10_000
    fleet.take(held.pop())
    assert policy.place(route("next"), fleet, terms()) is None
    while spoken(worker) > RoutingParams().kv_low:
        fleet.take(held.pop())
    assert policy.place(route("next"), fleet, terms()) is not None


def spoken(worker: Worker) -> float:
    grown = worker.context_tokens + 0.6 * (worker.kv_expected - worker.context_tokens)
    return grown / worker.kv_tokens


def test_a_closed_worker_takes_one_that_has_waited_for_long_as_long_as_it_is_not_full() -> None:
    small = BucketShape("small", 1, 0, 10_000)
    policy = libra(ToldPredictor(default=30_000))
    fleet = fleet_of({"small": 1}, buckets=(small,))
    placed(policy, fleet, "t0")
    waiting = route("t1")
    assert policy.place(waiting, fleet, terms(now=PATIENCE_S / 2)) is None
    decision = policy.place(waiting, fleet, terms(now=2 * PATIENCE_S))
    assert decision is not None
    assert decision.reason == "waited"
    waiting.prompt_tokens = 9900
    assert policy.place(waiting, fleet, terms(now=2 * PATIENCE_S)) is None


def test_an_empty_worker_takes_even_what_will_not_fit() -> None:
    policy = libra(ToldPredictor(default=30_000))
    fleet = fleet_of({"small": 1}, buckets=(BucketShape("small", 1, 0, 10_000),))
    assert policy.place(route("t"), fleet, terms()) is not None


def test_long_ones_avoid_the_worker_that_they_would_fill() -> None:
    buckets = (BucketShape("small", 2, 0, 7_000), BucketShape("roomy", 2, 0, 100_000))
    policy = libra(ToldPredictor(default=10_000))
    fleet = fleet_of({"small": 1, "roomy": 1}, buckets=buckets)
    assert placed(policy, fleet, "t").worker == "roomy-0"


def test_the_longest_is_judged_by_the_batch_that_will_be_left() -> None:
    predictor = ToldPredictor({"longest": 20_000}, default=200)
    policy, fleet = libra(predictor), fleet_of()
    timed(policy, fleet, "short", 0.03)
    timed(policy, fleet, "long", 0.008, request_s=0.002)
    for number in range(20):
        it = on(fleet, policy, "long-0", f"t{number}")
        it.kv_expected = 400
        fleet.recount(it)
    assert placed(policy, fleet, "brief").worker == "short-0"
    assert placed(policy, fleet, "longest").worker == "long-0"


def test_nobody_is_expected_to_sample_more_than_the_context_has_room_for() -> None:
    predictor = ToldPredictor(default=10_000_000)
    policy, fleet = two_speeds(predictor, short_s=0.02, long_s=0.01)
    it = on(fleet, policy, "short-0", prompt=RoutingParams().context_tokens_max - 150)
    decision = decide(policy, fleet, it)
    assert decision.reason == "best", "a few tokens pay for no move"


def test_what_was_learned_survives_dump_and_load() -> None:
    policy, _ = two_speeds(ToldPredictor({"t": 4500}), short_s=0.01, long_s=0.05)
    policy.move_measured(MoveMeasure("short", "long", "kv", 5000, 0.3))
    after, fleet = libra(), fleet_of()
    after.load(policy.dump())
    assert after.dump() == policy.dump()
    assert placed(after, fleet, "t").worker == "short-0"


def test_a_first_start_has_nothing_to_load() -> None:
    policy = libra()
    policy.load(b"")
    assert policy.dump() == libra().dump()


def test_beginnings_and_ends_reach_the_predictor() -> None:
    predictor = ToldPredictor()
    policy, fleet = libra(predictor), fleet_of()
    it = placed(policy, fleet, "t")
    policy.end(it, finished=True)
    assert predictor.begun == ["t"]
    assert predictor.ended == [("t", True)]


def test_a_worker_that_has_left_is_not_chosen_and_its_memory_goes() -> None:
    policy, fleet = two_speeds(ToldPredictor(), short_s=0.02, long_s=0.01)
    assert placed(policy, fleet, "t0").worker == "long-0"
    fleet.remove("long-0")
    assert placed(policy, fleet, "t1").worker == "short-0"
    fleet = fleet_of({"short": 1}, buckets=(SHORT, LONG))
    assert placed(policy, fleet, "t2").worker == "short-0"


def test_no_more_is_expected_than_may_still_be_sampled() -> None:
    policy, fleet = libra(ToldPredictor({"t": 1314}), output_tokens_max=196), fleet_of()
    told = decide(policy, fleet, on(fleet, policy, "short-0")).residual
    assert told == (96.0, 96.0, 96.0, 1.0)
    policy, fleet = libra(ToldPredictor({"t": 1314}), context_tokens_max=1100), fleet_of()
    it = on(fleet, policy, "short-0", prompt=900)
    turn(it, 100, outcome(), fleet)
    decision = policy.returned(it, fleet, terms())
    assert decision is not None
    assert decision.residual is not None
    assert decision.residual.p90 == 1100 - it.context_tokens


def test_a_prediction_within_the_limits_is_left_as_it_is() -> None:
    residual, it = Residual(50.5, 40.0, 96.0, 3.0), route("t", prompt=10)
    it.action_tokens = 100
    assert RoutingParams(output_tokens_max=196).possible(residual, it) is residual
    assert RoutingParams(output_tokens_max=90).possible(residual, it) == (0.0, 0.0, 0.0, 3.0)
