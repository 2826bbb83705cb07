"""Makes the demo's tiny agent: tokenizer, small Llama, and a deliberately sloppy warm start.

The warm start imitates transcripts that often skip the tool, call it with a wrong operand or
copy its result wrongly, so that the agent starts at a success rate of about a quarter with the
right behaviour within reach: something for reinforcement learning to climb. Its questions come
from a split that the demo's tasks never use. About fifteen minutes on one core:

    OMP_NUM_THREADS=1 python -m scripts.make_tiny_agent --output assets/tiny-agent
"""

import argparse
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.make_tasks import Problem, Split, demo_problem, problems
from services.rollout.parsers import error_line
from services.tools.builtin.arithmetic import answer_in, same_number
from services.tools.builtin.calculator import evaluate
from services.tools.sdk import ToolFault

PAD, END = "<|pad|>", "<|end|>"
CHAT_TOKENS = (PAD, "<|user|>", "<|assistant|>", END)
TAG_TOKENS = tuple(
    f"<{slash}{tag}>" for tag in ("calculator", "python", "result", "answer") for slash in ("", "/")
)
"""One token each, ordinary text otherwise: a trajectory costs a third of the spelled-out tags."""
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}{{ '<|assistant|>' }}"
    "{%- else -%}{{ '<|user|>' }}{%- endif -%}"
    "{{ message['content'] + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
CONTEXT_TOKENS = 512
TURNS_MAX = 4
TURN_TOKENS_MAX = 32
MICRO_BATCH_ROWS = 32

SKIP_SHARE = 0.6
"""Transcripts that guess instead of calling the tool."""
WRONG_OPERAND_SHARE = 0.25
"""Tool calls with one digit replaced."""
WRONG_COPY_SHARE = 0.25
"""Answers that copy the tool's result with one digit replaced."""


EVALUATION_EPISODES = 1024
Labelled = tuple[list[int], list[int]]
"""Token ids, and labels that are -100 where the policy did not sample."""


@dataclass(frozen=True)
class Segment:
    """A stretch of transcript, sampled by the policy or not."""

    text: str
    sampled: bool


@dataclass(frozen=True)
class Episode:
    """One attempt as the policy lived it: token ids, and which of them it sampled."""

    tokens: list[int]
    sampled: list[bool]
    called: bool
    correct: bool


def build_tokenizer() -> Tokenizer:
    """Byte-level tokenizer without merges: any text round-trips, one token per ASCII character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*CHAT_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in CHAT_TOKENS]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in TAG_TOKENS]
    )
    return tokenizer


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """Id of a token that exists."""
    found = tokenizer.token_to_id(text)
    assert found is not None, text
    return found


def with_chat_template(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers and vLLM load it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_TOKENS,
    )


def build_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """2.4M parameters, embeddings tied. Heads of 32 are the smallest that vLLM has on a CPU."""
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, END),
        pad_token_id=token_id(tokenizer, PAD),
    )
    return LlamaForCausalLM(config)


def call_text(problem: Problem, expression: str) -> str:
    """The assistant turn that has the environment's tool evaluate `expression`."""
    if problem.environment == "python":
        return f"<python>print({expression})</python>"
    return f"<calculator>{expression}</calculator>"


def replace_digit(text: str, rng: random.Random) -> str:
    """`text` with one of its digits replaced by another digit, never a leading zero."""
    places = [index for index, symbol in enumerate(text) if symbol.isdigit()]
    place = rng.choice(places)
    digit = rng.choice([d for d in "123456789" if d != text[place]])
    return text[:place] + digit + text[place + 1 :]


def sloppy_transcript(problem: Problem, rng: random.Random) -> list[Segment]:
    """A transcript in exactly the layout of the rollout loop, with a careless assistant.

    The `<|end|>` after a tool call is the loop's: the policy stops at the closing tag.
    """
    opening = Segment(f"<|user|>{problem.question}<|end|><|assistant|>", sampled=False)
    result = str(problem.answer)
    if rng.random() < SKIP_SHARE:
        guess = replace_digit(result, rng)
        return [opening, Segment(f"<answer>{guess}</answer><|end|>", sampled=True)]
    expression = problem.expression
    if rng.random() < WRONG_OPERAND_SHARE:
        expression = replace_digit(expression, rng)
        result = evaluate(expression)
    copied = replace_digit(result, rng) if rng.random() < WRONG_COPY_SHARE else result
    return [
        opening,
        Segment(call_text(problem, expression), sampled=True),
        Segment(observation_text(result), sampled=False),
        Segment(f"<answer>{copied}</answer><|end|>", sampled=True),
    ]


def observation_text(result: str) -> str:
    """What the rollout loop appends after a tool call."""
    return f"<|end|><|user|><result>{result}</result><|end|><|assistant|>"


def run_tool(turn: str) -> str | None:
    """In-process stand-in for the demo's two tools; None when the turn calls none."""
    found = re.search(r"<calculator>(.*)</calculator>|<python>print\((.*)\)</python>", turn)
    if not found:
        return None
    try:
        return evaluate(found[1] or found[2] or "")
    except ToolFault as fault:
        return error_line(str(fault))


def is_correct(turn: str, answer: int) -> bool:
    """Whether the last answer of the final turn is right."""
    given = answer_in(turn)
    return given is not None and same_number(given, str(answer))


@torch.no_grad()
def sample_turns(
    model: LlamaForCausalLM, contexts: Sequence[list[int]], stops: set[int], pad: int
) -> list[list[int]]:
    """Continue every context at temperature 1 until a stop token or `TURN_TOKENS_MAX`."""
    width = max(map(len, contexts))
    tokens = torch.tensor([[pad] * (width - len(c)) + c for c in contexts])
    mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    turns: list[list[int]] = [[] for _ in contexts]
    live = set(range(len(contexts)))
    cache = None
    for _ in range(TURN_TOKENS_MAX):
        output = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.past_key_values
        tokens = torch.multinomial(output.logits[:, -1].softmax(-1), 1)
        for index in sorted(live):
            turns[index].append(int(tokens[index]))
            if turns[index][-1] in stops:
                live.remove(index)
        if not live:
            break
        mask = torch.cat([mask, torch.ones_like(tokens)], 1)
        positions = positions[:, -1:] + 1
    return turns


def play(model: LlamaForCausalLM, tokenizer: Tokenizer, batch: Sequence[Problem]) -> list[Episode]:
    """Play every problem once through the multi-turn tool loop, at temperature 1."""
    stops = {token_id(tokenizer, text) for text in ("</calculator>", "</python>", END)}
    tokens = [tokenizer.encode(f"<|user|>{p.question}<|end|><|assistant|>").ids for p in batch]
    sampled = [[False] * len(context) for context in tokens]
    called = [False] * len(batch)
    final = [""] * len(batch)
    live = list(range(len(batch)))
    for _ in range(TURNS_MAX):
        turns = sample_turns(model, [tokens[i] for i in live], stops, token_id(tokenizer, PAD))
        playing: list[int] = []
        for i, turn in zip(live, turns, strict=True):
            tokens[i] += turn
            sampled[i] += [True] * len(turn)
            final[i] = tokenizer.decode(turn, skip_special_tokens=False)
            result = run_tool(final[i])
            if result is None:
                continue
            observation = tokenizer.encode(observation_text(result)).ids
            tokens[i] += observation
            sampled[i] += [False] * len(observation)
            called[i] = True
            playing.append(i)
        live = playing
        if not live:
            break
    return [
        Episode(tokens[i], sampled[i], called[i], is_correct(final[i], problem.answer))
        for i, problem in enumerate(batch)
    ]


def encode(tokenizer: Tokenizer, transcript: Sequence[Segment]) -> Labelled:
    """Token ids of a transcript and its labels: -100 where the policy did not sample."""
    ids: list[int] = []
    labels: list[int] = []
    for segment in transcript:
        piece = tokenizer.encode(segment.text).ids
        ids += piece
        labels += piece if segment.sampled else [-100] * len(piece)
    return ids, labels


def imitation_loss(model: LlamaForCausalLM, rows: Sequence[Labelled], pad: int) -> torch.Tensor:
    """Summed cross entropy of the assistant's tokens. Right padding needs no attention mask."""
    width = max(len(ids) for ids, _ in rows)
    tokens = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=tokens, use_cache=False).logits
    return cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
    )


def imitate(model: LlamaForCausalLM, rows: Sequence[Labelled], pad: int) -> float:
    """Accumulate the gradient of the mean loss; returns the loss.

    Rows of like length share a micro-batch: padding would double the work.
    """
    by_length = sorted(rows, key=lambda row: len(row[0]))
    scored = sum(label != -100 for _, labels in rows for label in labels)
    total = 0.0
    for micro_batch in batched(by_length, MICRO_BATCH_ROWS):
        loss = imitation_loss(model, micro_batch, pad) / scored
        loss.backward()
        total += loss.item()
    return total


def batched(rows: Sequence[Labelled], size: int) -> list[Sequence[Labelled]]:
    """Consecutive slices of at most `size`."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def learning_rate_share(step: int, steps: int) -> float:
    """Linear warm-up over 30 steps, cosine decay to a hundredth."""
    decay = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / 30) * max(decay, 0.01)


def warm_start(model: LlamaForCausalLM, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
    """Imitate sloppy transcripts of the warm-start split."""
    rng = random.Random(options.seed)
    stream = problems(demo_problem, Split.WARM_START, rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_share(step, options.steps)
    )
    model.train()
    for step in range(options.steps):
        batch = islice(stream, options.batch_size)
        rows = [encode(tokenizer, sloppy_transcript(problem, rng)) for problem in batch]
        optimizer.zero_grad()
        loss = imitate(model, rows, token_id(tokenizer, PAD))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == options.steps - 1:
            print(f"step {step:4d}  loss {loss:.3f}", flush=True)
    model.eval()


def measure(model: LlamaForCausalLM, tokenizer: Tokenizer, split: Split, seed: int) -> None:
    """Print how often the agent succeeds at temperature 1, for each environment."""
    stream = problems(demo_problem, split, random.Random(seed))
    batch = list(islice(stream, EVALUATION_EPISODES))
    played = list(zip(batch, play(model, tokenizer, batch), strict=True))
    for name in ("calculator", "python", "all"):
        chosen = [e for p, e in played if name in (p.environment, "all")]
        correct = sum(e.correct for e in chosen) / len(chosen)
        called = sum(e.called for e in chosen) / len(chosen)
        sampled = sum(sum(e.sampled) for e in chosen) / len(chosen)
        print(
            f"{split.value} {name}: success {correct:.3f}, called the tool {called:.3f}, "
            f"{sampled:.1f} sampled tokens, {len(chosen)} episodes"
        )


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, output: Path) -> None:
    """Write the directory that transformers and vLLM load, weights in bfloat16."""
    model.generation_config = GenerationConfig(
        eos_token_id=token_id(tokenizer, END),
        pad_token_id=token_id(tokenizer, PAD),
        do_sample=True,
        temperature=1.0,
        top_k=0,
    )
    model.save_pretrained(output)
    with_chat_template(tokenizer).save_pretrained(output)


def main() -> None:
    """Train, round to bfloat16, measure what was rounded, and save it."""
    parser = argparse.ArgumentParser(description="Make the demo's tiny agent.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    warm_start(model, tokenizer, options)
    model.bfloat16().float()
    for split in (Split.TRAINING, Split.HELD_OUT):
        measure(model, tokenizer, split, options.seed)
    save(model.bfloat16(), tokenizer, options.output)


if __name__ == "__main__":
    main()
