"""Tiny random models and their segments, made in a moment."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from common.messages.coordinator import Manifest
from services.coordinator.manifest import build_manifest

EOS = "<|end|>"
State = dict[str, torch.Tensor]


def make_tiny_model(path: Path, *, tied: bool, seed: int = 0, context_tokens: int = 512) -> Path:
    """Save a random model with a character tokenizer: Llama when tied, Qwen2 when not."""
    tokenizer = char_tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": context_tokens,
        "tie_word_embeddings": tied,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**shape)) if tied else untied_qwen(shape)
        perturb(model)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def untied_qwen(shape: dict[str, Any]) -> Qwen2ForCausalLM:
    """Qwen2 has attention biases, which Llama has not."""
    return Qwen2ForCausalLM(Qwen2Config(**shape))


def perturb(model: torch.nn.Module, scale: float = 0.15) -> None:
    """Large enough weights that two versions and two contexts give different distributions."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.normal_(centre, scale)


def char_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and an end-of-sequence token.

    Byte-level BPE without merges, since transformers replaces any other kind by the one that it
    expects for Qwen2.
    """
    vocabulary = {EOS: 0, **{c: i + 1 for i, c in enumerate(sorted(ByteLevel.alphabet()))}}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS)


def random_state(state: State, seed: int) -> State:
    """Another version of the same model: every tensor drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (1.0 if "norm" in name else 0.0)
        + 0.15 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        for name, tensor in state.items()
    }


def write_segment(path: Path, state: State, version: int) -> Manifest:
    """Write a version as the trainer does, and describe it as the coordinator does."""
    save_file({name: tensor.clone() for name, tensor in state.items()}, path)
    return build_manifest(version, str(path))
