"""The shipped agent's directory, and the layout of what it was warmed up with."""

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoTokenizer

from common.messages.tools import ChatMessage
from scripts.make_tasks import Problem, Split, demo_problem, problems
from scripts.make_tiny_agent import (
    CHAT_TOKENS,
    TAG_TOKENS,
    is_correct,
    replace_digit,
    run_tool,
    sloppy_transcript,
)
from services.rollout.parsers import TagsParser
from services.rollout.render import Renderer
from services.rollout.tokenizer import HuggingFaceTokenizer

AGENT = Path("assets/tiny-agent")
BYTES_MAX = 5_000_000
tokenizer: Any = cast("Any", AutoTokenizer).from_pretrained(AGENT, local_files_only=True)

TURNS = st.lists(
    st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=8)), min_size=1, max_size=5
)


def messages(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def test_the_directory_is_small() -> None:
    assert sum(file.stat().st_size for file in AGENT.iterdir()) < BYTES_MAX


def test_every_id_that_the_model_can_sample_has_a_text() -> None:
    config = json.loads((AGENT / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)
    assert all(tokenizer.decode([token]) for token in range(len(tokenizer)))


def test_the_weights_are_bfloat16_and_the_head_is_tied() -> None:
    with safe_open(AGENT / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert file.get_slice("model.embed_tokens.weight").get_dtype() == "BF16"
    assert "lm_head.weight" not in names


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("mark", [*CHAT_TOKENS, *TAG_TOKENS])
def test_marks_and_tags_are_one_token_each(mark: str) -> None:
    assert len(tokenizer.encode(mark)) == 1


def test_only_marks_are_special() -> None:
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    assert special == set(CHAT_TOKENS)


@given(TURNS, st.integers(1, 5))
def test_a_longer_conversation_begins_with_the_shorter_ones_tokens(
    turns: list[tuple[str, str]], kept: int
) -> None:
    shorter = tokenizer.apply_chat_template(messages(turns[:kept]), return_dict=False)
    longer = tokenizer.apply_chat_template(messages(turns), return_dict=False)
    assert longer[: len(shorter)] == shorter


def test_the_warm_start_saw_the_layout_of_the_chat_template() -> None:
    for problem in sample(20):
        segments = sloppy_transcript(problem, random.Random(0))
        turns = [("user", problem.question)]
        for segment in segments[1:]:
            if segment.sampled:
                turns.append(("assistant", segment.text.removesuffix("<|end|>")))
            else:
                turns.append(("user", segment.text.split("<|user|>")[1].split("<|end|>")[0]))
        rendered = tokenizer.apply_chat_template(messages(turns), tokenize=False)
        assert "".join(segment.text for segment in segments) == rendered


async def test_the_rollout_loop_appends_what_the_warm_start_saw() -> None:
    renderer = Renderer(HuggingFaceTokenizer(tokenizer), TagsParser(), str(AGENT))
    action = tokenizer.encode("<calculator>37+48</calculator>")
    prompt = await renderer.prompt([ChatMessage(role="user", content="37+48=?")], [])
    observation = await renderer.observation(action, "85")
    assert tokenizer.decode(prompt) == "<|user|>37+48=?<|end|><|assistant|>"
    assert tokenizer.decode(observation) == "<|end|><|user|><result>85</result><|end|><|assistant|>"


def test_transcripts_are_sloppy_but_their_results_are_true() -> None:
    rng = random.Random(0)
    for problem in sample(200):
        segments = sloppy_transcript(problem, rng)
        if len(segments) == 4:
            assert f"<result>{run_tool(segments[1].text)}</result>" in segments[2].text
    right = sum(
        is_correct(sloppy_transcript(problem, rng)[-1].text, problem.answer)
        for problem in sample(400)
    )
    assert 0.15 < right / 400 < 0.3


@given(st.integers(10, 999), st.integers(0, 2**32))
def test_a_replaced_digit_changes_the_number_and_not_its_length(number: int, seed: int) -> None:
    replaced = replace_digit(str(number), random.Random(seed))
    assert int(replaced) != number
    assert len(replaced) == len(str(number))


def test_a_turn_without_a_call_runs_no_tool() -> None:
    assert run_tool("<answer>12</answer><|end|>") is None


def test_a_bad_call_is_answered_and_not_raised() -> None:
    assert str(run_tool("<calculator>1+</calculator>")).startswith("Error: ")


def sample(count: int) -> list[Problem]:
    return list(islice(problems(demo_problem, Split.WARM_START, random.Random(1)), count))
