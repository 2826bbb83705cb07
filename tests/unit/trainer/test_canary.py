from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from common.canary import canary_tokens
from services.trainer.canary import chosen_logprobs, make_canary
from services.trainer.model import load_policy
from services.trainer.outlet import Outlet
from services.trainer.publish import Segment, plan_layout
from tests.support.models import make_tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_the_canary_of_a_segment_is_the_canary_of_its_weights(
    tmp_path: Path, dtype: torch.dtype, tied: bool
) -> None:
    model = load_policy(make_tiny_model(tmp_path / "model", tied=tied)).model
    outlet, canary = Outlet.of(model), make_canary(model)
    assert canary is not None
    segment = Segment(tmp_path / "segment", plan_layout(outlet.shapes, dtype))
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight").mul_(1.5)
    segment.write(outlet.shards(model, 0, 1))
    tokens = torch.tensor(canary_tokens(model.config.vocab_size))
    with torch.no_grad():
        expected = chosen_logprobs(model(input_ids=tokens[None]).logits[0], tokens)
    found = canary.logprobs(outlet.by_own_names(segment.views))
    tolerance = 1e-4 if dtype is torch.float32 else 0.5
    assert found == pytest.approx(expected, abs=tolerance)


def test_a_canary_that_would_compute_something_else_is_not_used() -> None:
    class Scaled(GPT2LMHeadModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output: Any = super().forward(*args, **kwargs)
            output.logits = output.logits * 3.0
            return output

    config = GPT2Config(vocab_size=200, n_embd=16, n_layer=1, n_head=2)
    assert make_canary(GPT2LMHeadModel(config).eval()) is not None
    assert make_canary(Scaled(config).eval()) is None
