"""The tokenizer and chat template of a model directory, behind the little that rendering needs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from common.errors import ConfigError
from common.messages.tools import ChatMessage, ToolSpec


class TemplateRefused(ValueError):
    """The chat template raised for these messages."""


class ChatTokenizer(Protocol):
    """A tokenizer with a chat template. Its methods may run in any thread."""

    special_tokens: dict[str, int]
    """Tokens that structure the text, such as ends of turns, by their text."""
    end_tokens: frozenset[int]
    """Tokens that end what the model samples."""

    def apply_template(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], *, open_turn: bool
    ) -> str:
        """The conversation as text; `open_turn` adds the beginning of the assistant's turn.

        Raises:
            TemplateRefused: the template does not take these messages.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, with nothing added."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The exact text, special tokens included."""
        ...


class HuggingFaceTokenizer:
    """A transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = cast("dict[int, Any]", tokenizer.added_tokens_decoder)
        self.special_tokens = {
            cast("str", token.content): index for index, token in added.items() if token.special
        }
        end = cast("int | None", tokenizer.eos_token_id)
        self.end_tokens = frozenset[int]() if end is None else frozenset([end])

    def apply_template(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], *, open_turn: bool
    ) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                [message.model_dump() for message in messages],
                tools=[_as_function(tool) for tool in tools] or None,
                add_generation_prompt=open_turn,
                tokenize=False,
            )
        except Exception as error:  # A template can divide by zero.
            raise TemplateRefused(f"{type(error).__name__}: {error}") from error

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def load_tokenizer(path: str) -> ChatTokenizer:
    """Load the tokenizer of a model directory.

    Raises:
        ConfigError: there is none, or it has no chat template.
    """
    # Imported late: it takes a second, and tests and the simulator bring their own tokenizer.
    from transformers import AutoTokenizer

    if not Path(path).is_dir():
        raise ConfigError(f"model.path: {path} is not a directory")
    try:
        tokenizer: Any = cast("Any", AutoTokenizer).from_pretrained(path, local_files_only=True)
        tokenizer.encode("")  # Some of what is wrong shows only here.
    except Exception as error:  # transformers and tokenizers raise anything for a malformed file.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError(
            f"model.path: {path} has no tokenizer that loads ({reason}); copy the files of the "
            "model there again"
        ) from error
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model.path: the tokenizer in {path} has no chat template; "
            "add a chat_template.jinja, or use an instruction-tuned model"
        )
    return HuggingFaceTokenizer(tokenizer)


def _as_function(tool: ToolSpec) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": json.loads(tool.parameters),
        },
    }
