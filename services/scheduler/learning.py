"""The routing policy of a run, and what it has learned, kept in the run directory.

What is kept only makes decisions better, so nothing that is wrong with the file stops a run: it
is said, and learning begins anew.
"""

import os
from pathlib import Path

import structlog
from xxhash import xxh3_128_digest

from common.config import Config
from services.scheduler.predictor.residual import ResidualPredictor
from services.scheduler.routing.params import RoutingParams
from services.scheduler.routing.policies import make_policy
from services.scheduler.routing.policy import Policy

log = structlog.get_logger()

FILE = "learned.bin"
DIGEST_BYTES = 16


def policy_of(config: Config) -> Policy:
    """The policy that `scheduler.placement` names, before it has learned anything."""
    return make_policy(config.scheduler.placement, RoutingParams.of(config), ResidualPredictor())


def restore(config: Config, run_dir: Path) -> Policy:
    """The same with what an earlier scheduler of this run has kept. Blocks; for the start only."""
    policy, path = policy_of(config), run_dir / FILE
    try:
        kept = path.read_bytes()
    except FileNotFoundError:
        return policy
    except OSError as error:
        log.warning("learning.ignored", reason=str(error))
        return policy
    digest, dumped = kept[:DIGEST_BYTES], kept[DIGEST_BYTES:]
    if xxh3_128_digest(dumped) != digest:
        log.warning("learning.ignored", reason=f"{path} is damaged")
        return policy
    try:
        policy.load(dumped)
    except ValueError as error:
        log.warning("learning.ignored", reason=str(error))
        return policy_of(config)  # The other one may have taken over half of it.
    log.info("learning.restored", bytes=len(dumped))
    return policy


def keep(dumped: bytes, run_dir: Path) -> None:
    """Write down what a policy dumped: the old file stays until the new one is whole. Blocks."""
    if not dumped:
        return
    path = run_dir / FILE
    draft = path.with_suffix(".tmp")
    try:
        with draft.open("wb") as file:
            file.write(xxh3_128_digest(dumped) + dumped)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        log.warning("learning.unsaved", reason=str(error))
