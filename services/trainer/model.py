"""The policy: a Hugging Face causal LM in float32, asked for log-probabilities of sampled tokens.

Shapes: B sequences, P tokens that all begin with, T tokens of the longest after that, A action
tokens of all sequences together.
"""

# torch and transformers are partially annotated; what they return is annotated here by hand.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common.errors import ConfigError
from services.trainer.batch import TrainingSequence

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""By their names in the configuration."""
PROBE_TOLERANCE = 1e-3
"""Relative; what differs by more is another computation, not rounding."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that go through the model together, padded on the right."""

    prefix: Tensor | None
    """(1, P) int64: what every sequence begins with, before `tokens`; None when P is 0."""
    tokens: Tensor
    """(B, T) int64."""
    rows: Tensor
    """(A,) int64: the sequence of each action token, in order of sequence and position."""
    columns: Tensor
    """(A,) int64: the place in `tokens` *before* the action token; its output predicts it."""
    targets: Tensor
    """(A,) int64: the action token."""


def micro_batch(
    sequences: Sequence[TrainingSequence], device: torch.device, *, shared: int = 0
) -> MicroBatch:
    """Lay sequences out whose first `shared` tokens are equal.

    No sequences give a batch without action tokens that can still be run.
    """
    width = max((len(s.tokens) - shared for s in sequences), default=1)
    tokens = np.zeros((max(len(sequences), 1), width), np.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence.tokens) - shared] = sequence.tokens[shared:]
    prefix = sequences[0].tokens[:shared] if sequences else np.zeros(shared, np.int32)
    actions = [s.actions - shared for s in sequences]
    counts = [len(a) for a in actions]
    rows = np.repeat(np.arange(len(sequences)), counts)
    positions = np.concatenate(actions, dtype=np.int64) if actions else np.empty(0, np.int64)
    return MicroBatch(
        prefix=torch.tensor(prefix[None], dtype=torch.int64, device=device) if shared else None,
        tokens=torch.from_numpy(tokens).to(device),
        rows=torch.from_numpy(rows).to(device),
        columns=torch.from_numpy(positions - 1).to(device),
        targets=torch.from_numpy(tokens[rows, positions]).to(device),
    )


class Policy(nn.Module):
    """A causal LM whose forward pass gives log-probabilities of the sampled tokens only."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._selects = _head_can_run_alone(model)
        self.shares_prefix = False
        """Whether micro-batches with a prefix can be run."""
        self.shares_prefix = self._can_share_prefix()

    def forward(self, batch: MicroBatch, temperature: float) -> Tensor:
        """Log-probability of each action token under softmax(logits / temperature): (A,)."""
        logits = self._logits(batch).float() / temperature
        sampled = logits.gather(-1, batch.targets[:, None]).squeeze(-1)
        return sampled - logits.logsumexp(-1)

    def _logits(self, batch: MicroBatch) -> Tensor:
        """Logits that predict the action tokens: (A, vocabulary).

        The head is most of a small model's memory; it is computed at (A,) positions instead of
        (B, T) where the architecture is a body and a head and nothing between.
        """
        run = _body(self.model) if self._selects else self.model
        cache = None
        if batch.prefix is not None:
            cache = DynamicCache(config=self.model.config)
            run(input_ids=batch.prefix, past_key_values=cache, use_cache=True)
            cache.batch_repeat_interleave(len(batch.tokens))
        output = run(input_ids=batch.tokens, past_key_values=cache, use_cache=cache is not None)
        if not self._selects:
            return output.logits[batch.rows, batch.columns]
        return _head(self.model)(output.last_hidden_state[batch.rows, batch.columns])

    def _can_share_prefix(self) -> bool:
        """Whether a shared prefix gives the same numbers and gradient as one for each sequence.

        Not so where the cache is not made of keys and values alone (recurrent layers), or is not
        differentiable. Tried instead of listed: architectures are many.
        """
        tokens = np.array([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]], np.int32) % vocabulary(self.model)
        places, none = np.array([3, 4], np.int32), np.zeros(2)
        pair = [TrainingSequence(row, places, none, none, 0.0, 4) for row in tokens]  # type: ignore[arg-type]
        weight = cast("Tensor", self.model.get_input_embeddings().weight)
        found: list[tuple[Tensor, Tensor]] = []
        try:
            for shared in (0, 2):
                logprobs = self(micro_batch(pair, self.model.device, shared=shared), 1.0)
                found.append((logprobs, torch.autograd.grad(logprobs.sum(), weight)[0]))
        except (TypeError, AttributeError, ValueError, RuntimeError, NotImplementedError):
            return False
        return all(
            (shared - alone).norm() <= PROBE_TOLERANCE * alone.norm()
            for alone, shared in zip(*found, strict=True)
        )


def load_policy(path: Path) -> Policy:
    """Load a model directory in float32, without dropout.

    Raises:
        ConfigError: nothing there that transformers loads as a causal LM.
    """
    _check_directory(path)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"{path}: cannot be loaded as a causal LM: {_first_line(error)}"
        ) from error
    model, info = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            f"{path}: {len(missing)} weights are missing, {missing[0]!r} among them; the weights "
            "do not belong to this config.json"
        )
    return Policy(model.eval())


def weights_to_publish(model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The entries of a full state dict as `save_pretrained` would name them, tied ones once.

    The values are views of those in `state` wherever the architecture stores what it computes
    with; some store experts apart, whose entries are copies.
    """
    return revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory; model.path must be a Hugging Face model")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path}: has no config.json, so it is not a Hugging Face model")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}/config.json: {_first_line(error)}") from error
    named: list[str] = list(config.architectures or ())
    if not any(name in _causal_lm_names() for name in named):
        raise ConfigError(
            f"{path}/config.json: architecture {', '.join(named) or 'unknown'} is not a causal LM"
        )


def _causal_lm_names() -> set[str]:
    return set(_flattened(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))


def _flattened(names: Any) -> Iterator[str]:
    for name in names:
        yield from (name,) if isinstance(name, str) else name


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _body(model: PreTrainedModel) -> nn.Module:
    return model.base_model


def _head(model: PreTrainedModel) -> nn.Module:
    return cast("nn.Module", model.get_output_embeddings())


def vocabulary(model: PreTrainedModel) -> int:
    """Number of token ids."""
    return model.config.get_text_config().vocab_size


@torch.no_grad()
def _head_can_run_alone(model: PreTrainedModel) -> bool:
    """Whether head(body(x)) is the model's logits: not so with logit caps, scales, projections."""
    if _body(model) is model or model.get_output_embeddings() is None:
        return False
    tokens = torch.arange(4, device=model.device)[None] % vocabulary(model)
    output = _body(model)(input_ids=tokens, use_cache=False)
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None:
        return False
    alone = _head(model)(hidden)
    whole = model(input_ids=tokens, use_cache=False).logits
    return alone.shape == whole.shape and torch.allclose(alone, whole, atol=PROBE_TOLERANCE)
