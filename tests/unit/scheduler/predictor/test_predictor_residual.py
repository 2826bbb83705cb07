import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.trajectory import ToolStatus
from services.scheduler.predictor.residual import ResidualPredictor
from services.scheduler.routing.outcomes import Payload, ToolOutcome
from services.scheduler.routing.route import Residual, Route

OK, ERROR = ToolStatus.OK, ToolStatus.ERROR
Turn = tuple[int, ToolStatus]
"""Tokens sampled, and how the tool call went."""


def route(name: str, task: str = "", turns: list[Turn] | None = None) -> Route:
    made = Route(name, task or name, task or name, prompt_tokens=50)
    for turn in turns or []:
        tell(made, turn)
    return made


def tell(told: Route, turn: Turn) -> None:
    outcome = ToolOutcome("search", turn[1], Payload.SMALL, 20, 0.1)
    told.returned(outcome, action_tokens=turn[0], observation_tokens=20)


def play(predictor: ResidualPredictor, name: str, turns: list[Turn], task: str = "") -> None:
    """A whole trajectory; the last turn ends it without a tool call."""
    living = route(name, task)
    predictor.begin(living)
    for turn in turns[:-1]:
        tell(living, turn)
        predictor.returned(living)
    living.action_tokens += turns[-1][0]
    predictor.end(living, finished=True)


def draw(seed: int, count: int, tokens: float = 60.0) -> list[list[Turn]]:
    """Turns of lognormal length; a call that fails makes another one likelier."""
    rng = random.Random(seed)
    drawn: list[list[Turn]] = []
    for _ in range(count):
        turns: list[Turn] = []
        going = True
        while going:
            status = ERROR if rng.random() < 0.4 else OK
            turns.append((round(tokens * rng.lognormvariate(0.0, 0.4)) + 1, status))
            going = len(turns) < 12 and rng.random() < (0.9 if status is ERROR else 0.55)
        drawn.append([*turns, (round(tokens), OK)])
    return drawn


def learned(trajectories: list[list[Turn]], group: int = 4) -> ResidualPredictor:
    predictor = ResidualPredictor()
    for index, turns in enumerate(trajectories):
        play(predictor, f"t{index}", turns, f"g{index // group}")
    return predictor


PROBES: list[list[Turn]] = [[], [(30, OK)], [(70, ERROR)], [(60, OK), (90, ERROR), (40, ERROR)]]


def ask(predictor: ResidualPredictor, task: str = "new") -> list[Residual]:
    return [predictor.predict(route("probe", task, turns)) for turns in PROBES]


def assert_same(first: ResidualPredictor, second: ResidualPredictor, tasks: list[str]) -> None:
    for task in tasks:
        for one, other in zip(ask(first, task), ask(second, task), strict=True):
            assert one == pytest.approx(other, rel=1e-6)


def test_without_evidence_there_is_a_guess_and_it_says_so() -> None:
    for residual in ask(ResidualPredictor()):
        assert 0 < residual.p50 < residual.p90
        assert residual.evidence == 0


def test_a_failed_call_means_more_to_come_where_it_has_meant_so() -> None:
    predictor = learned(draw(1, 300))
    after_ok = predictor.predict(route("a", "new", [(60, OK)]))
    after_error = predictor.predict(route("b", "new", [(60, ERROR)]))
    assert after_error.mean > 1.3 * after_ok.mean
    assert after_ok.evidence > 10


def test_a_context_with_few_observations_leans_on_its_parents() -> None:
    predictor = learned(draw(2, 300))
    usual = predictor.predict(route("a", "new", [(60, OK)]))
    strange = route("b", "new")
    outcome = ToolOutcome("never-seen", OK, Payload.SMALL, 20, 0.1)
    strange.returned(outcome, action_tokens=60, observation_tokens=20)
    assert predictor.predict(strange).mean == pytest.approx(usual.mean, rel=0.35)


def test_finished_siblings_pull_the_estimate_towards_theirs_where_siblings_are_alike() -> None:
    alike = learned([[(60, OK)] * (11 if index // 4 % 2 else 3) for index in range(240)])
    for index in range(3):
        play(alike, f"l{index}", [(60, OK)] * 11, "long")
        play(alike, f"s{index}", [(60, OK)] * 3, "short")
    long, new, short = (
        alike.predict(route("a", task, [(60, OK)])).mean for task in ("long", "new", "short")
    )
    assert long > 1.3 * new
    assert new > 1.3 * short


def test_siblings_that_have_nothing_in_common_are_hardly_listened_to() -> None:
    predictor = learned(draw(3, 400))
    for index in range(3):
        play(predictor, f"l{index}", [(60, OK)] * 11, "long")
    long, new = (predictor.predict(route("a", task, [(60, OK)])).mean for task in ("long", "new"))
    assert long == pytest.approx(new, rel=0.3)


def test_unfinished_trajectories_keep_the_estimate_from_falling_to_the_short_ones() -> None:
    def mean_with(unfinished: int) -> float:
        predictor = ResidualPredictor()
        for index in range(unfinished):
            living = route(f"long{index}")
            predictor.begin(living)
            for _ in range(8):
                tell(living, (60, OK))
                predictor.returned(living)
        for index in range(12):
            play(predictor, f"short{index}", [(60, OK), (60, OK)])
        predictor.settle()
        return predictor.predict(route("new", turns=[(60, OK)])).mean

    assert mean_with(36) > 2 * mean_with(0)


def test_more_tokens_since_the_return_never_make_the_whole_shorter() -> None:
    predictor = learned(draw(4, 300))
    probe = route("a", "new", [(60, OK)])
    wholes = [
        since + predictor.predict(probe, tokens_since_return=since).mean
        for since in (0, 20, 60, 150, 400, 1000, 5000, 50_000)
    ]
    assert wholes == pytest.approx(sorted(wholes), rel=1e-12)
    assert predictor.predict(probe, tokens_since_return=50_000).mean > 1000


def test_the_chance_of_much_more_rises_with_tokens_since_the_return() -> None:
    predictor = learned(draw(4, 300))
    probe = route("a", "new", [(60, OK)])

    def chance(total: float, since: int) -> float:
        left = predictor.distribution(probe, tokens_since_return=since)
        return sum(since + value > total for value in left) / len(left)

    assert chance(300, 0) < chance(300, 100) < chance(300, 250)


def test_lengths_that_grow_are_followed_within_a_few_hundred_trajectories() -> None:
    predictor = ResidualPredictor()
    for index, turns in enumerate(draw(5, 600, tokens=600)):
        play(predictor, f"a{index}", turns)
    before = predictor.predict(route("a", turns=[(600, OK)])).mean
    for index, turns in enumerate(draw(6, 300, tokens=2800)):
        play(predictor, f"b{index}", turns)
    after = predictor.predict(route("b", turns=[(2800, OK)])).mean
    assert after / before == pytest.approx(2800 / 600, rel=0.2)
    starts = predictor.predict(route("c")).p50
    actual = sorted(sum(tokens for tokens, _ in turns) for turns in draw(7, 301, tokens=2800))
    assert starts == pytest.approx(actual[150], rel=0.3)


@pytest.mark.slow
def test_quantiles_hold_on_data_that_it_has_not_seen() -> None:
    predictor = ResidualPredictor()
    below_p50 = below_p90 = points = 0
    for index, turns in enumerate(draw(8, 900)):
        living = route(f"t{index}", f"g{index // 4}")
        predictor.begin(living)
        total = sum(tokens for tokens, _ in turns)
        for turn in turns[:-1]:
            tell(living, turn)
            predictor.returned(living)
            if index >= 300:
                residual = predictor.predict(living)
                points += 1
                below_p50 += total - living.action_tokens <= residual.p50
                below_p90 += total - living.action_tokens <= residual.p90
        living.action_tokens = total
        predictor.end(living, finished=True)
    assert abs(below_p50 / points - 0.5) < 0.05
    assert abs(below_p90 / points - 0.9) < 0.05


def test_asking_learns_nothing() -> None:
    asked, silent = learned(draw(9, 60)), learned(draw(9, 60))
    for _ in range(100):
        ask(asked)
        asked.distribution(route("stranger", "g3", [(60, OK)]))
    assert ask(asked) == ask(silent)
    assert asked.dump() == silent.dump()


def test_equal_inputs_give_equal_predictions() -> None:
    assert ask(learned(draw(10, 120)), "g1") == ask(learned(draw(10, 120)), "g1")


def test_what_did_not_finish_by_itself_is_not_learned() -> None:
    predictor, other = learned(draw(11, 60)), learned(draw(11, 60))
    lost = route("lost", "g1")
    predictor.begin(lost)
    tell(lost, (9000, OK))
    predictor.returned(lost)
    predictor.end(lost, finished=False)
    assert_same(predictor, other, ["g1", "new"])


def test_a_route_with_a_past_is_predicted_as_if_its_turns_had_been_told() -> None:
    predictor = learned(draw(12, 80))
    told = route("told", "g1")
    predictor.begin(told)
    for turn in PROBES[3]:
        tell(told, turn)
        predictor.returned(told)
    expected = predictor.predict(told)
    predictor.end(told, finished=False)
    back = route("back", "g1", PROBES[3])
    predictor.begin(back)
    assert predictor.predict(back) == expected


def test_a_dump_gives_the_same_predictions_and_the_same_dump() -> None:
    predictor = learned(draw(13, 150))
    dumped = predictor.dump()
    other = ResidualPredictor()
    other.load(dumped)
    assert_same(predictor, other, ["new", "g1", "g36"])
    assert other.dump() == dumped


def test_what_is_learned_after_a_load_is_the_same_as_without_it() -> None:
    straight = learned(draw(14, 100))
    loaded = ResidualPredictor()
    loaded.load(straight.dump())
    for index, turns in enumerate(draw(15, 40)):
        for predictor in (straight, loaded):
            play(predictor, f"n{index}", turns, f"g{index}")
    assert_same(straight, loaded, ["new", "g1", "g20"])


@pytest.mark.parametrize("dumped", [b"", b"rubbish", b"\x81\xa6format\xa5other"])
def test_a_dump_of_something_else_is_refused(dumped: bytes) -> None:
    with pytest.raises(ValueError, match="not a predictor's state"):
        ResidualPredictor().load(dumped)


def clocked(trajectories: list[list[Turn]], chosen: Iterator[int]) -> ResidualPredictor:
    """One that saw some of the trajectories, under the clock that all count by."""
    predictor = ResidualPredictor()
    for index in chosen:
        predictor.clock = float(index)
        play(predictor, f"t{index}", trajectories[index], f"g{index // 4}")
    return predictor


@pytest.mark.slow
@settings(max_examples=10)
@given(st.integers(0, 1000), st.lists(st.booleans(), min_size=8, max_size=8))
def test_merged_shards_equal_one_that_saw_everything(seed: int, split: list[bool]) -> None:
    trajectories = draw(seed, 32)
    whole = clocked(trajectories, iter(range(32)))
    whole.settle()

    def shards() -> tuple[ResidualPredictor, ResidualPredictor]:
        return (
            clocked(trajectories, (i for i in range(32) if split[i // 4])),
            clocked(trajectories, (i for i in range(32) if not split[i // 4])),
        )

    first, second = shards()
    first.merge(second)
    assert_same(first, whole, ["new", "g0", "g7"])
    first, second = shards()
    second.merge(first)
    assert_same(second, whole, ["new", "g0", "g7"])


def test_three_shards_merge_in_any_order_to_the_same() -> None:
    trajectories = draw(16, 60)

    def merged(order: list[int]) -> ResidualPredictor:
        first, *others = (
            clocked(trajectories, (i for i in range(60) if i // 4 % 3 == shard)) for shard in order
        )
        for other in others:
            first.merge(other)
        return first

    assert_same(merged([0, 1, 2]), merged([2, 0, 1]), ["new", "g3"])


def test_memory_is_bounded_however_many_trajectories_and_prompts_there_were() -> None:
    predictor = ResidualPredictor(rows_max=200)
    sizes: set[int] = set()
    for index, turns in enumerate(draw(17, 240)):
        play(predictor, f"t{index}", turns, f"prompt-{index:04d}")
        if index % 60 == 59:
            sizes.add(len(predictor._siblings))
    assert max(sizes) <= 100
    assert not predictor._live
    assert len(predictor._ring.kept) <= 100
    assert len(predictor.dump()) < 500_000


def test_a_smaller_ring_takes_the_newest_of_a_larger_one() -> None:
    predictor = learned(draw(18, 100))
    small = ResidualPredictor(rows_max=64)
    small.load(predictor.dump())
    assert 0 < small._ring.total <= 64
    # 64 rows are some 20 trajectories: they agree on the size, and no closer.
    assert ask(small)[1].mean == pytest.approx(ask(predictor)[1].mean, rel=0.5)


def test_a_trajectory_begun_twice_is_one() -> None:
    predictor = ResidualPredictor()
    for _ in range(3):
        predictor.begin(route("t0", "g0", [(60, OK)]))
    assert predictor._siblings["g0"].live == 1
    predictor.end(route("t0", "g0", [(60, OK)]), finished=False)
    assert not predictor._siblings
