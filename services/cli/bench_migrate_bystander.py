"""Computes what a replica would, for nobody: shows what a busy core beside the trainer's costs.

`python -m services.cli.bench_migrate_bystander RUN_DIR PARENT` reads `go` and `stop` lines.
"""

import queue
import sys
import threading
from pathlib import Path

import torch

from common.config_load import load_config
from common.service import die_with_parent
from services.cli.bench_migrate_stage import prepared_batch
from services.trainer.batch import batch_sequences
from services.trainer.model import load_policy
from services.trainer.step import Learner

LOOK_S = 0.5


def main(run_dir: Path, parent: int) -> None:
    """Train a copy of the model on the prepared batch while told to."""
    die_with_parent(parent)
    torch.set_num_threads(1)
    config = load_config(run_dir / "config.toml", [])
    learner = Learner(load_policy(Path(config.model.path)), config)
    sequences = batch_sequences(prepared_batch().values(), config.training)
    orders: queue.Queue[str] = queue.Queue(maxsize=8)
    threading.Thread(target=_read, args=(orders,), daemon=True).start()
    busy, step = False, 0
    while True:
        try:
            order = orders.get(block=not busy, timeout=None if busy else LOOK_S)
        except queue.Empty:
            order = ""
        if order == "end":
            return
        busy = order == "go" or (busy and order != "stop")
        if busy:
            step += 1
            learner.train(sequences, step)


def _read(orders: "queue.Queue[str]") -> None:
    for line in sys.stdin:
        orders.put(line.strip())
    orders.put("end")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
