"""Three tokenizers with chat templates of the kinds that models come with."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from services.rollout.tokenizer import HuggingFaceTokenizer

CHAR_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}"
    "{{ message['content'] + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
CHATML_TEMPLATE = (
    "{%- if tools -%}{{ '<|im_start|>system\n# Tools\n' }}"
    "{%- for tool in tools -%}{{ tool | tojson + '\n' }}{%- endfor -%}"
    "{{ '<|im_end|>\n' }}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'tool' -%}"
    "{{ '<|im_start|>user\n<tool_response>\n' + message['content'] }}"
    "{{ '\n</tool_response><|im_end|>\n' }}"
    "{%- else -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
NO_TOOL_ROLE_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' -%}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{ raise_exception('no role ' + message['role']) }}{%- endif -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def tiny_chat() -> HuggingFaceTokenizer:
    """One token per byte; turns between `<|user|>`, `<|assistant|>` and `<|end|>`."""
    return chat_tokenizer(CHAR_TEMPLATE, ["<|user|>", "<|assistant|>"], "<|end|>")


def chatml(template: str = CHATML_TEMPLATE) -> HuggingFaceTokenizer:
    """ChatML with tools and a tool role; byte-level BPE with a few merges."""
    return chat_tokenizer(template, ["<|im_start|>"], "<|im_end|>", words=True)


def no_tool_role() -> HuggingFaceTokenizer:
    """ChatML with a default system prompt, no tools and no tool role."""
    return chatml(NO_TOOL_ROLE_TEMPLATE)


def chat_tokenizer(
    template: str, special: list[str], end: str, *, words: bool = False
) -> HuggingFaceTokenizer:
    """A byte-level tokenizer with the given special tokens and template."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "o"), ("to", "o"), ("a", "s"), ("Ġ", "a"), ("e", "r")] if words else []
    vocabulary = [*special, end, *symbols, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(
        models.BPE(vocab={text: index for index, text in enumerate(vocabulary)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in [*special, end]])
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")]
    )
    return HuggingFaceTokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=end,
            chat_template=template,
            clean_up_tokenization_spaces=False,
        )
    )
