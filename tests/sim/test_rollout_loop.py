"""The life of one trajectory, with a scripted policy, on the simulated network."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.clock import run_sim
from common.errors import EngineError, Refusal, RequestRefused
from common.messages.tools import (
    CallTool,
    ChatMessage,
    SessionClosed,
    SessionGraded,
    SessionOpened,
    ToolReturned,
)
from common.trajectory import FailureKind, StopReason, ToolStatus, unpack_tokens
from services.rollout.engine import GenerateRequest
from services.rollout.loop import turn_seed
from tests.support.chat import chatml
from tests.support.peers import CALCULATOR, Call, FakeTools, returns
from tests.support.rollout import (
    END,
    TINY,
    Cluster,
    assign,
    moved,
    packed,
    play,
    rollout_config,
    says,
)
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sim import until

CALL = "<calculator>2+2</calculator>"
ANSWER = f"<answer>4</answer>{END}"


def statuses(cluster: Cluster) -> list[ToolStatus | None]:
    return [turn.tool_status for turn in cluster.scheduler.turns]


def test_a_trajectory_calls_its_tool_answers_and_is_graded() -> None:
    cluster = Cluster(says(CALL, ANSWER))
    result = play(cluster)
    assert (result.reward, result.stop_reason) == (1.0, StopReason.ANSWERED)
    first, last = cluster.scheduler.turns
    assert first.prompt_tokens == packed("<|user|>2+2<|end|><|assistant|>")
    assert first.action_tokens == packed(CALL)
    assert first.observation_tokens == packed(
        "<|end|><|user|><result>4</result><|end|><|assistant|>"
    )
    assert (first.tool, first.tool_status, first.result) == ("calculator", ToolStatus.OK, None)
    assert (last.turn, last.prompt_tokens, last.observation_tokens) == (1, b"", b"")
    assert unpack_tokens(last.action_versions) == [7] * len(TINY.encode(ANSWER))
    (opening,), (grading,) = cluster.tools.openings, cluster.tools.gradings
    assert (opening.session_id, opening.ttl_s, opening.resume) == ("t0-1", 77, False)
    assert [turn.action for turn in grading.turns] == [CALL, "<answer>4</answer>"]
    assert "<result>4</result>" in grading.turns[0].observation
    assert cluster.tools.closed == ["t0-1"]


def test_each_turn_is_sampled_with_its_own_seed() -> None:
    cluster = Cluster(says(CALL, CALL, ANSWER))
    play(cluster)
    seeds = [request.seed for request in cluster.engine.requests]
    assert seeds == [turn_seed(5, 0), turn_seed(5, 1), turn_seed(5, 2)]
    assert len(set(seeds)) == 3
    assert turn_seed(5, 0) == 676751438938395983


@pytest.mark.parametrize(
    "text",
    [
        "<calculator>2+2",
        "<tool>2+2",
    ],
)
def test_a_malformed_call_is_shown_to_the_model_and_the_trajectory_goes_on(text: str) -> None:
    cluster = Cluster(says(text + END, ANSWER))
    assert play(cluster).reward == 1.0
    assert statuses(cluster) == [ToolStatus.MALFORMED, None]
    assert "Error: " in TINY.decode(unpack_tokens(cluster.scheduler.turns[0].observation_tokens))
    assert cluster.tools.calls == []


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "calculator", "arguments": {',
        '{"name": "nothing", "arguments": {}}',
        '{"name": "calculator", "arguments": "2+2"}',
        json.dumps({"name": "calculator", "arguments": {"expression": "1" * 300_000}}),
    ],
)
def test_bad_hermes_calls_are_shown_to_the_model(body: str) -> None:
    tokenizer = chatml()
    limits = {"turn_tokens_max": 1 << 21, "trajectory_tokens_max": 1 << 22}
    config = rollout_config("hermes", **limits)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"context_tokens": 1 << 22})}
    )
    engine = says(
        f"<tool_call>{body}</tool_call>", "<answer>4</answer><|im_end|>", tokenizer=tokenizer
    )
    engine.context_tokens_max = 1 << 22
    cluster = Cluster(engine, config=config, tokenizer=tokenizer)
    assert play(cluster).reward == 1.0
    assert statuses(cluster) == [ToolStatus.MALFORMED, None]


@pytest.mark.parametrize(
    "status", [ToolStatus.ERROR, ToolStatus.TIMEOUT, ToolStatus.EMPTY, ToolStatus.MALFORMED]
)
def test_what_the_model_caused_is_graded(status: ToolStatus) -> None:
    cluster = Cluster(says(CALL, ANSWER), FakeTools(call=returns("Error: no", status)))
    assert play(cluster).reward == 1.0
    assert statuses(cluster) == [status, None]


def test_a_failure_of_ours_is_never_a_reward() -> None:
    broken = returns("the sandbox is gone", ToolStatus.INFRASTRUCTURE)
    cluster = Cluster(says(CALL, ANSWER), FakeTools(call=broken))
    result = play(cluster)
    assert (result.failure, result.reward) == (FailureKind.TOOL, None)
    assert "the sandbox is gone" in result.detail
    assert statuses(cluster) == [ToolStatus.INFRASTRUCTURE]
    assert cluster.scheduler.turns[0].action_tokens == packed(CALL)


@pytest.mark.parametrize(
    ("graded", "failure"),
    [
        (SessionGraded(reward=None, failure=FailureKind.GRADER, detail="x"), FailureKind.GRADER),
        (SessionGraded(reward=None), FailureKind.GRADER),
        (SessionGraded(reward=float("nan")), FailureKind.GRADER),
    ],
)
def test_a_grader_that_cannot_be_run_is_a_failure(
    graded: SessionGraded, failure: FailureKind
) -> None:
    result = play(Cluster(says(ANSWER), FakeTools(graded_as=graded)))
    assert (result.failure, result.reward) == (failure, None)


@pytest.mark.parametrize(
    ("opened", "failure"),
    [
        (
            SessionOpened(messages=[], tools=[], failure=FailureKind.ENVIRONMENT),
            FailureKind.ENVIRONMENT,
        ),
        (SessionOpened(messages=[], tools=[]), FailureKind.TOOL),
        (
            SessionOpened(
                messages=[ChatMessage(role="user", content="x")],
                tools=[CALCULATOR.model_copy(update={"parameters": "no JSON"})],
            ),
            FailureKind.TOOL,
        ),
        (
            SessionOpened(messages=[ChatMessage(role="user", content="7" * 5000)], tools=[]),
            FailureKind.ENVIRONMENT,
        ),
    ],
    ids=["reset failed", "no prompt", "no schema", "prompt too long"],
)
def test_an_environment_that_gives_no_usable_prompt_is_a_failure(
    opened: SessionOpened, failure: FailureKind
) -> None:
    cluster = Cluster(says(ANSWER), FakeTools(opened_as=opened))
    result = play(cluster)
    assert (result.failure, result.reward) == (failure, None)
    assert cluster.scheduler.turns[0].action_tokens == b""


def test_a_turn_cut_in_its_call_is_no_error() -> None:
    cluster = Cluster(says(CALL), config=rollout_config(turn_tokens_max=20))
    result = play(cluster)
    assert (result.stop_reason, result.reward) == (StopReason.TOKENS_MAX, 1.0)
    assert cluster.tools.calls == []
    assert statuses(cluster) == [None]


def test_the_limit_of_a_turn_is_not_the_limit_of_the_trajectory() -> None:
    tokens = len(TINY.encode(CALL))
    cluster = Cluster(
        says(CALL, CALL, CALL, ANSWER),
        config=rollout_config(turn_tokens_max=tokens, trajectory_tokens_max=4 * tokens),
    )
    assert play(cluster).stop_reason is StopReason.ANSWERED
    assert [len(made.tokens) for made in cluster.engine.generations][:3] == [tokens] * 3


def test_the_last_turn_is_reported_without_the_observation_nobody_will_read() -> None:
    cluster = Cluster(says(CALL, CALL), config=rollout_config(turns_max=2))
    assert play(cluster).stop_reason is StopReason.TURNS_MAX
    assert [bool(turn.observation_tokens) for turn in cluster.scheduler.turns] == [True, False]
    assert len(cluster.tools.calls) == 2
    assert "<result>4</result>" in cluster.tools.gradings[0].turns[-1].observation


def test_an_observation_that_fills_the_context_ends_the_trajectory() -> None:
    cluster = Cluster(says(CALL, ANSWER), FakeTools(call=returns("7" * 3000)))
    result = play(cluster)
    assert (result.stop_reason, result.reward) == (StopReason.CONTEXT_OVERFLOW, 1.0)


def test_the_environment_can_end_the_episode() -> None:
    cluster = Cluster(says(CALL, ANSWER), FakeTools(call=returns("won", done=True)))
    assert play(cluster).stop_reason is StopReason.ENVIRONMENT
    assert len(cluster.engine.requests) == 1


def test_further_calls_of_a_turn_are_reported_to_the_model() -> None:
    cluster = Cluster(says(CALL + CALL + END, ANSWER))
    play(cluster)
    assert len(cluster.tools.calls) == 1
    shown = TINY.decode(unpack_tokens(cluster.scheduler.turns[0].observation_tokens))
    assert "only the first call" in shown


def refuses(refusal: Refusal) -> Call:
    def call(_request: CallTool) -> ToolReturned:
        raise RequestRefused(refusal, "no")

    return call


@pytest.mark.parametrize(
    "tools",
    [
        FakeTools(call=refuses(Refusal.FAILED)),
        FakeTools(call=refuses(Refusal.INVALID)),
        FakeTools(call=lambda _request: SessionClosed()),  # type: ignore[arg-type,return-value]
        FakeTools(opened_as=SessionClosed()),  # type: ignore[arg-type]
    ],
    ids=["failed", "invalid", "garbage for a result", "garbage for a session"],
)
def test_a_server_that_breaks_its_promise_is_a_failure_of_ours(tools: FakeTools) -> None:
    result = play(Cluster(says(CALL, ANSWER), tools))
    assert (result.failure, result.reward) == (FailureKind.TOOL, None)
    assert "calculator" in result.detail


def test_a_busy_server_gets_the_call_again() -> None:
    refusals = iter([Refusal.OVERLOADED, Refusal.DRAINING, Refusal.NOT_READY])

    def call(request: CallTool) -> ToolReturned:
        for refusal in refusals:
            raise RequestRefused(refusal)
        return returns("4")(request)

    cluster = Cluster(says(CALL, ANSWER), FakeTools(call=call))
    assert play(cluster).reward == 1.0
    assert {request.call_id for request in cluster.tools.calls} == {"0"}


def test_an_opening_without_an_answer_is_sent_again_to_the_same_server() -> None:
    async def scenario() -> None:
        cluster = Cluster(says(ANSWER))
        async with cluster.running():
            one, other = cluster.worker.mesh.identity, cluster.server.mesh.identity
            cluster.network.partition(one, other)
            await cluster.ask(assign())
            await asyncio.sleep(15)
            cluster.network.heal(one, other)
            assert (await cluster.result()).reward == 1.0
            assert {opening.session_id for opening in cluster.tools.openings} == {"t0-1"}

    run_sim(scenario())


def test_a_full_server_is_asked_again() -> None:
    cluster = Cluster(says(ANSWER), FakeTools(refuse_opening=5))
    assert play(cluster).reward == 1.0
    assert len(cluster.tools.openings) == 6


def test_a_server_that_stays_full_is_a_failure_of_ours() -> None:
    result = play(Cluster(says(ANSWER), FakeTools(refuse_opening=10**6)))
    assert result.failure is FailureKind.TOOL
    assert "overloaded" in result.detail


def test_an_environment_that_nobody_serves_is_a_failure_of_ours() -> None:
    result = play(Cluster(says(ANSWER), FakeTools(environments="python,search")))
    assert result.failure is FailureKind.TOOL
    assert "'calculator'" in result.detail


def test_a_call_to_a_lost_server_is_sent_again_and_a_lost_session_is_a_failure() -> None:
    async def scenario() -> Cluster:
        cluster = Cluster(says(CALL, ANSWER), FakeTools(call_s=5.0))
        async with cluster.running():
            await cluster.ask(assign())
            await cluster.tools.entered.wait()
            async with cluster.restarted_tools():
                result = await cluster.result()
                assert (result.failure, result.reward) == (FailureKind.TOOL, None)
                assert "not_found" in result.detail
        return cluster

    cluster = run_sim(scenario())
    assert len(cluster.tools.calls) == 1


def test_a_call_whose_connection_was_lost_is_executed_once() -> None:
    async def scenario() -> Cluster:
        cluster = Cluster(says(CALL, ANSWER))
        async with cluster.running():
            one, other = cluster.worker.mesh.identity, cluster.server.mesh.identity
            cluster.tools.call = lambda _request: cut(cluster, one, other)
            await cluster.ask(assign())
            await cluster.tools.entered.wait()
            await asyncio.sleep(15)
            cluster.network.heal(one, other)
            assert (await cluster.result()).reward == 1.0
        return cluster

    def cut(cluster: Cluster, one: str, other: str) -> ToolReturned:
        cluster.network.partition(one, other)
        return ToolReturned(status=ToolStatus.OK, content="4", latency_s=0.0)

    assert len(run_sim(scenario()).tools.calls) == 1


def test_a_server_that_does_not_come_back_is_a_failure_in_bounded_time() -> None:
    async def scenario() -> None:
        cluster = Cluster(says(CALL, ANSWER), FakeTools(call_s=5.0))
        async with cluster.running():
            await cluster.ask(assign())
            await cluster.tools.entered.wait()
            cluster.network.kill(cluster.server.mesh.identity)
            before = asyncio.get_running_loop().time()
            assert (await cluster.result()).failure is FailureKind.TOOL
            assert asyncio.get_running_loop().time() - before < 60

    run_sim(scenario())


def test_a_moved_trajectory_goes_on_with_the_same_tokens_and_session() -> None:
    async def scenario() -> Cluster:
        cluster = Cluster(says(CALL, CALL, ANSWER))
        async with cluster.running():
            cluster.scheduler.go_on = False
            await cluster.ask(assign())
            await until(lambda: len(cluster.scheduler.turns) == 1)
            cluster.scheduler.go_on = True
            await cluster.ask(moved(cluster.scheduler.turns))
            assert (await cluster.result()).reward == 1.0
        return cluster

    cluster = run_sim(scenario())
    first = cluster.scheduler.turns[0]
    context = [
        token
        for part in (first.prompt_tokens, first.action_tokens, first.observation_tokens)
        for token in unpack_tokens(part)
    ]
    assert list(cluster.engine.requests[1].context) == context
    assert [opening.resume for opening in cluster.tools.openings] == [False, True]
    assert {turn.session_id for turn in cluster.scheduler.turns} == {"t0-1"}
    assert [turn.action for turn in cluster.tools.gradings[0].turns] == [
        CALL,
        CALL,
        "<answer>4</answer>",
    ]
    assert cluster.tools.closed == ["t0-1"]


def test_a_moved_trajectory_whose_session_is_gone_fails() -> None:
    prompt = packed("<|user|>2+2<|end|><|assistant|>")
    observation = packed("<|end|><|user|><result>4</result><|end|><|assistant|>")
    result = play(
        Cluster(says(CALL, ANSWER)),
        assign(
            turn=1,
            prompt_tokens=prompt,
            later_tokens=[packed(CALL), observation],
            session_id="t0-0",
            tool_server="calculator",
        ),
    )
    assert (result.failure, result.reward) == (FailureKind.TOOL, None)


def test_one_failed_generation_fails_one_trajectory() -> None:
    engine = ScriptedEngine(lambda _request: EngineError("too long"), version=7)
    result = play(Cluster(engine))
    assert (result.failure, result.detail) == (FailureKind.ENGINE, "too long")


def test_an_unexpected_error_of_one_trajectory_leaves_the_others_alone(capsys) -> None:
    def write(request: GenerateRequest) -> list[int]:
        if request.request_id.startswith("bad"):
            raise KeyError("oops")
        return TINY.encode(ANSWER)

    async def scenario() -> None:
        cluster = Cluster(ScriptedEngine(write, version=7))
        async with cluster.running():
            await cluster.ask(assign("bad"))
            await cluster.ask(assign("good"))
            await until(lambda: cluster.scheduler.ended(2))
            (bad,), (good,) = cluster.scheduler.of("bad"), cluster.scheduler.of("good")
            assert bad.result
            assert bad.result.failure is FailureKind.ENGINE
            assert "KeyError" in bad.result.detail
            assert good.result
            assert good.result.reward == 1.0

    run_sim(scenario())
    assert "Traceback" in capsys.readouterr().out


def test_a_turn_that_the_scheduler_does_not_want_ends_the_work() -> None:
    async def scenario() -> None:
        cluster = Cluster(says(CALL, ANSWER))
        async with cluster.running():
            cluster.scheduler.refusal = Refusal.STALE_FENCE
            await cluster.ask(assign())
            await until(lambda: bool(cluster.engine.generations))
            await asyncio.sleep(5)
            assert cluster.scheduler.reports[-1].holding == []
            assert len(cluster.engine.requests) == 1
            assert cluster.tools.closed == []

    run_sim(scenario())


def test_tokens_that_contradict_themselves_are_refused() -> None:
    async def scenario() -> None:
        async with Cluster(says(ANSWER)).running() as cluster:
            with pytest.raises(RequestRefused) as caught:
                await cluster.ask(assign(turn=1, prompt_tokens=b"123"))
            assert caught.value.refusal is Refusal.INVALID

    run_sim(scenario())


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
CHATML = chatml()


@given(
    st.lists(st.tuples(texts, texts), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from(["tags", "hermes"]),
)
@settings(max_examples=30)
def test_contexts_are_the_concatenation_of_what_was_journaled(
    turns: list[tuple[str, str]], ended: bool, tool_format: str
) -> None:
    tokenizer, end = (TINY, END) if tool_format == "tags" else (CHATML, "<|im_end|>")
    call = (
        CALL
        if tool_format == "tags"
        else '<tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>'
    )
    actions = [before + call + (end if ended else "") for before, _ in turns]
    results = iter([result for _, result in turns])
    tools = FakeTools(
        call=lambda _request: ToolReturned(
            status=ToolStatus.OK, content=next(results), latency_s=0.0
        )
    )
    cluster = Cluster(
        says(*actions, "done" + end, tokenizer=tokenizer),
        tools,
        config=rollout_config(tool_format, turn_tokens_max=500, trajectory_tokens_max=2000),
        tokenizer=tokenizer,
    )
    assert play(cluster).reward == 1.0
    journal = cluster.scheduler.turns
    context = unpack_tokens(journal[0].prompt_tokens)
    for request, made, turn in zip(
        cluster.engine.requests, cluster.engine.generations, journal, strict=True
    ):
        assert list(request.context) == context
        assert unpack_tokens(turn.action_tokens) == made.tokens
        context = [*context, *made.tokens, *unpack_tokens(turn.observation_tokens)]
