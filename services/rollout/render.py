"""From messages to token ids, without ever re-tokenising what was sampled.

A context only grows: prompt, then per turn the action as the engine sampled it and an observation.
The observation is the exact text that the chat template puts between the end of the assistant's
words and the beginning of its next turn, so the model sees what the template would have shown it.
That needs a template in which earlier turns stay as they were; others are refused at start.
"""

import asyncio
from collections.abc import Sequence

from common.errors import ConfigError
from common.messages.tools import ChatMessage, ToolSpec
from services.rollout.parsers import Parser
from services.rollout.tokenizer import ChatTokenizer, TemplateRefused

INLINE_CHARS_MAX = 32_768
"""Longer texts are tokenised in a thread: these take about 10 ms, and the loop must go on."""
PROBE_ACTION = "probeprobe"
"""Stands for an action where the template is asked what it puts around one; no template's own
text holds it."""
PROBE_RESULT = "31415"
PROBE_TOOL = ToolSpec(name="probetool", description="A probe.", parameters='{"type": "object"}')


class Renderer:
    """Renders for one tokenizer, template and tool format.

    Raises:
        ConfigError: the template cannot be used; names the model directory.
    """

    def __init__(self, tokenizer: ChatTokenizer, parser: Parser, model_path: str) -> None:
        self._tokenizer, self._parser = tokenizer, parser
        try:
            problem = self._find_problem()
        except TemplateRefused as error:
            problem = f"refuses the messages of this tool format ({error})"
        if problem:
            raise ConfigError(f"model.path: the chat template of {model_path} {problem}")
        suffix = self._observation_text("")
        opening = self._template([_user("")], open_turn=True)
        self._structure = {
            text: token
            for text, token in tokenizer.special_tokens.items()
            if text in suffix + opening or token in tokenizer.end_tokens
        }
        self._ends = tokenizer.end_tokens.union(tokenizer.encode(suffix)[:1]) & set(
            tokenizer.special_tokens.values()
        )

    async def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        """Token ids of a prompt, up to where the assistant's turn begins."""
        shown = [self._disarmed(message) for message in messages]
        text = self._template(shown, tools if self._parser.shows_tools else (), open_turn=True)
        return await self._encode(text)

    async def observation(self, action: Sequence[int], content: str) -> list[int]:
        """Token ids to append after `action`, so that the model sees `content` as the result.

        An end-of-turn token that was sampled is not appended again.
        """
        message = self._disarmed(self._parser.result(content))
        suffix = await self._encode(self._observation_text_of(message))
        return suffix[1:] if action and suffix and action[-1] == suffix[0] else suffix

    def action_text(self, action: Sequence[int]) -> str:
        """What the model wrote in one turn, without the token that ended it."""
        ended = bool(action) and action[-1] in self._ends
        return self._tokenizer.decode(action[:-1] if ended else action)

    def text(self, tokens: Sequence[int]) -> str:
        """The exact text of any tokens."""
        return self._tokenizer.decode(tokens)

    async def _encode(self, text: str) -> list[int]:
        if len(text) <= INLINE_CHARS_MAX:
            return self._tokenizer.encode(text)
        return await asyncio.to_thread(self._tokenizer.encode, text)

    def _template(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        *,
        open_turn: bool,
    ) -> str:
        return self._tokenizer.apply_template(messages, tools, open_turn=open_turn)

    def _observation_text(self, content: str) -> str:
        return self._observation_text_of(self._parser.result(content))

    def _observation_text_of(self, message: ChatMessage) -> str:
        text = self._template([_user("?"), _probe(), message], open_turn=True)
        return text.partition(PROBE_ACTION)[2]

    def _disarmed(self, message: ChatMessage) -> ChatMessage:
        """Break up what would become a turn boundary: content must not speak as the template."""
        content = message.content
        for text in self._structure:
            content = content.replace(text, f"{text[0]} {text[1:]}")
        return ChatMessage(role=message.role, content=content)

    def _find_problem(self) -> str:
        """What makes the template unusable, or an empty string."""
        result = self._parser.result(PROBE_RESULT)
        shown = (PROBE_TOOL,) if self._parser.shows_tools else ()
        opening = self._template([_user("2+2?")], shown, open_turn=True)
        suffix = self._observation_text_of(result)
        turn = [_probe(), result]
        whole = self._template([_user("2+2?"), *turn, *turn], shown, open_turn=True)
        if shown and PROBE_TOOL.name not in opening:
            return "does not show tools to the model; set rollout.tool_format to 'tags'"
        expected = opening + 2 * (PROBE_ACTION + suffix)
        if whole != expected:
            return (
                "rewrites earlier turns, so contexts would not be prefixes of each other "
                f"(expected {expected[-200:]!r}, got {whole[-200:]!r})"
            )
        if PROBE_RESULT not in suffix:
            return "does not show the results of tools; set rollout.tool_format to 'tags'"
        return self._find_merge(opening, suffix)

    def _find_merge(self, opening: str, suffix: str) -> str:
        """Pieces that are tokenised one by one must give the tokens of the whole."""
        encode = self._tokenizer.encode
        whole = encode(opening + PROBE_ACTION + suffix)
        pieces = encode(opening) + encode(PROBE_ACTION) + encode(suffix)
        return "" if whole == pieces else "lets its tokenizer merge tokens across turns"


def _user(content: str) -> ChatMessage:
    return ChatMessage(role="user", content=content)


def _probe() -> ChatMessage:
    return ChatMessage(role="assistant", content=PROBE_ACTION)
