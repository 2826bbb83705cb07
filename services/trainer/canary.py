"""Log-probabilities that tell whether a worker decodes with the weights of the version it names.

They are computed from the published bytes, by a second model object that has no weights of its
own: the training thread's model stays alone with the training thread, and with several ranks no
collective is needed.
"""

# torch and transformers are partially annotated; what they return is annotated here by hand.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Mapping

import structlog
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PreTrainedModel

from common.canary import canary_tokens
from services.trainer.model import vocabulary

log = structlog.get_logger()

TOLERANCE = 1e-3
"""Per token, of the same weights in float32; another computation is off by far more."""


class Canary:
    """The architecture of a policy, to be run with weights from anywhere."""

    def __init__(self, model: PreTrainedModel) -> None:
        with torch.device("meta"):
            self._skeleton: nn.Module = AutoModelForCausalLM.from_config(
                model.config, attn_implementation="sdpa"
            ).eval()
        # Those that belong to no state dict, as rotary frequencies, are as meta as the weights.
        self._buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        self.tokens = torch.tensor(canary_tokens(vocabulary(model)))

    @torch.no_grad()
    def logprobs(self, state: Mapping[str, Tensor]) -> list[float]:
        """Of each canary token but the first, given those before it, at temperature 1.

        Args:
            state: weights by the model's own names, on one device; tied ones once.
        """
        device = next(iter(state.values())).device
        tokens = self.tokens.to(device)
        buffers = {name: buffer.to(device) for name, buffer in self._buffers.items()}
        output = functional_call(
            self._skeleton,
            {**buffers, **state},
            kwargs={"input_ids": tokens[None], "use_cache": False},
        )
        return chosen_logprobs(output.logits[0], tokens)


def make_canary(model: PreTrainedModel) -> Canary | None:
    """A canary that was seen to compute what the unsharded model computes; None if it does not.

    Tried instead of listed: architectures are many, and a canary that is wrong would have every
    worker quarantined.
    """
    try:
        canary = Canary(model)
        given = canary.tokens.to(model.device)
        with torch.no_grad():
            output = model(input_ids=given[None], use_cache=False)
        expected = chosen_logprobs(output.logits[0], given)
        found = canary.logprobs(dict(model.named_parameters()))
    except (TypeError, AttributeError, ValueError, RuntimeError, KeyError) as error:
        log.warning("canary.skipped", reason=type(error).__name__)
        return None
    if any(abs(a - b) > TOLERANCE for a, b in zip(expected, found, strict=True)):
        log.warning("canary.skipped", reason="differs")
        return None
    return canary


def chosen_logprobs(logits: Tensor, tokens: Tensor) -> list[float]:
    """Log-probabilities of tokens[1:] under logits of shape (len(tokens), vocabulary)."""
    logprobs = logits[:-1].float().log_softmax(-1)
    return logprobs.gather(-1, tokens[1:, None]).squeeze(-1).tolist()
