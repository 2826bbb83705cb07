"""Which engine a bucket gets."""

import pytest

from common.config import BucketConfig, Config
from common.errors import ConfigError
from services.rollout import engines
from services.rollout.engines import make_engine
from services.rollout.fake_engine import FakeEngine


def config_of(bucket: BucketConfig) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "r", "max_steps": 1},
            "model": {"path": "m", "context_tokens": 512},
            "tasks": {"path": "t"},
            "buckets": [bucket],
            "tools": [{"name": "t", "target": "x"}],
        }
    )


def test_a_fake_bucket_gets_the_fake() -> None:
    bucket = BucketConfig(name="b", engine="fake")
    assert isinstance(make_engine(config_of(bucket), bucket, 0, "run"), FakeEngine)


@pytest.mark.parametrize("kind", ["auto", "torch"])
def test_no_other_engine_than_vllm_splits_a_model(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "vllm_usable", lambda *_: False)
    bucket = BucketConfig.model_validate({"name": "b", "engine": kind, "tensor_parallel": 2})
    with pytest.raises(ConfigError, match='bucket "b": the torch engine cannot split'):
        make_engine(config_of(bucket), bucket, 0, "run")
