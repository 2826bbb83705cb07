from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from services.trainer.model import load_policy, weights_to_publish
from services.trainer.outlet import Outlet
from tests.support.models import make_tiny_model


def test_what_is_published_is_what_save_pretrained_would_name(tmp_path: Path) -> None:
    for tied in (True, False):
        model = load_policy(make_tiny_model(tmp_path / str(tied), tied=tied)).model
        outlet, expected = Outlet.of(model), weights_to_publish(model, model.state_dict())
        shards = outlet.shards(model, 0, 1)
        assert shards.keys() == outlet.shapes.keys() == expected.keys()
        assert all(torch.equal(shards[name].rows, value) for name, value in expected.items())


def test_shards_are_the_live_weights(tmp_path: Path) -> None:
    model = load_policy(make_tiny_model(tmp_path, tied=True)).model
    shards = Outlet.of(model).shards(model, 0, 1)
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight").fill_(7.0)
    assert shards["model.embed_tokens.weight"].rows.eq(7.0).all()


def test_experts_that_are_stored_apart_have_shapes_and_no_shards() -> None:
    config = Qwen3MoeConfig(
        vocab_size=200,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_experts=2,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    outlet, expected = Outlet.of(model), weights_to_publish(model, model.state_dict())
    assert outlet.names is None
    shapes = {name: value.shape for name, value in outlet.shapes.items()}
    assert shapes == {name: value.shape for name, value in expected.items()}
