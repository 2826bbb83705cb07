"""A rank other than 0: follows orders until rank 0 is gone.

`python -m services.trainer.follower PARENT COPIED` with orders on standard input; COPIED is the
descriptor where it writes a byte for each copy that has ended.
"""

# torch and transformers are partially annotated; what they return is annotated here by hand.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.config import Config
from services.trainer.learners import build_learner, build_policy, full_state, optimizer_state
from services.trainer.model import DTYPES
from services.trainer.orders import COPIED, FAILED, read, unpacked
from services.trainer.outlet import Outlet
from services.trainer.publish import Copier, Segment, plan_layout
from services.trainer.rounds import Followed
from services.trainer.step import Learner

PR_SET_PDEATHSIG = 1


class Child:
    """What a rank other than 0 does with its orders."""

    def __init__(self, learner: Learner, config: Config, copier: Copier, copied: int) -> None:
        self._learner = learner
        self._copier = copier
        self._copied = copied
        """Where a byte is written when a copy has ended."""
        self._outlet = Outlet.of(learner.policy.model)
        self._layout = plan_layout(self._outlet.shapes, DTYPES[config.model.dtype])
        self._segments: dict[str, Segment] = {}
        """Rank 0 made these few files and uses them in turn."""

    def follow(self, order: Mapping[str, Any]) -> None:
        """Do one order."""
        learner = self._learner
        match order["order"]:
            case "train":
                sequences = [unpacked(s) for s in order["sequences"]]
                learner.train(
                    sequences,
                    order["step"],
                    before_update=self._copier.join,
                    sharing=Followed(lambda: read(sys.stdin.buffer)),
                )
            case "publish":
                self._publish(order["segment"])
            case "weights":
                full_state(learner)
            case "optimizer":
                optimizer_state(learner)
            case unknown:
                raise AssertionError(unknown)

    def _publish(self, path: str) -> None:
        if path not in self._segments:
            self._segments[path] = Segment(Path(path), self._layout, create=False)
        learner = self._learner
        shards = self._outlet.shards(learner.policy.model, learner.rank, learner.ranks)
        self._copier.join()
        self._copier.start(self._segments[path], shards).add_done_callback(self._report)

    def _report(self, copy: "Future[None]") -> None:
        os.write(self._copied, FAILED if copy.exception() else COPIED)


def main(parent: int, copied: int) -> int:
    """Follow rank 0 until it closes the pipe or dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It died before the call above.
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):  # Rank 0 decides how the run ends.
        signal.signal(number, signal.SIG_IGN)
    setup = read(sys.stdin.buffer)
    if setup is None:
        return 0
    config = Config.model_validate_json(setup["config"])
    model_path, rank = Path(setup["model_path"]), setup["rank"]
    learner = build_learner(
        build_policy(config, model_path, rank=rank),
        config,
        model_path,
        resume=setup["resume"],
        rank=rank,
        rendezvous=Path(setup["rendezvous"]),
    )
    with ThreadPoolExecutor(1, "libra-copy") as executor:
        child = Child(learner, config, Copier(executor), copied)
        while (order := read(sys.stdin.buffer)) is not None:
            child.follow(order)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
