"""The policy: a Hugging Face causal LM in float32, asked for log-probabilities of sampled tokens.

Shapes: B sequences, T tokens of the longest, A action tokens of all sequences together.
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
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common.errors import ConfigError
from services.trainer.batch import TrainingSequence

PROBE_TOLERANCE = 1e-4
"""Of logits; what differs by more is another computation, not rounding."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that go through the model together, padded on the right."""

    tokens: Tensor
    """(B, T) int64."""
    rows: Tensor
    """(A,) int64: the sequence of each action token, in order of sequence and position."""
    columns: Tensor
    """(A,) int64: the position *before* the action token, whose output predicts it."""
    targets: Tensor
    """(A,) int64: the action token."""


def micro_batch(sequences: Sequence[TrainingSequence], device: torch.device) -> MicroBatch:
    """Lay sequences out; none gives a batch without action tokens that can still be run."""
    width = max((len(s.tokens) for s in sequences), default=1)
    tokens = np.zeros((max(len(sequences), 1), width), np.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence.tokens)] = sequence.tokens
    actions = [s.actions for s in sequences]
    counts = [len(a) for a in actions]
    rows = np.repeat(np.arange(len(sequences)), counts)
    positions = np.concatenate(actions, dtype=np.int64) if actions else np.empty(0, np.int64)
    return MicroBatch(
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
        if not self._selects:
            logits = self.model(input_ids=batch.tokens, use_cache=False).logits
            return logits[batch.rows, batch.columns]
        hidden = _body(self.model)(input_ids=batch.tokens, use_cache=False).last_hidden_state
        return _head(self.model)(hidden[batch.rows, batch.columns])


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
    except (OSError, ValueError, RuntimeError) as error:
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


@torch.no_grad()
def _head_can_run_alone(model: PreTrainedModel) -> bool:
    """Whether head(body(x)) is the model's logits: not so with logit caps, scales, projections."""
    if _body(model) is model or model.get_output_embeddings() is None:
        return False
    tokens = torch.arange(4, device=model.device)[None] % model.config.get_text_config().vocab_size
    output = _body(model)(input_ids=tokens, use_cache=False)
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None:
        return False
    alone = _head(model)(hidden)
    whole = model(input_ids=tokens, use_cache=False).logits
    return alone.shape == whole.shape and torch.allclose(alone, whole, atol=PROBE_TOLERANCE)
