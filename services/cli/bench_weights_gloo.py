"""One rank of a broadcast by gloo: `… -m services.cli.bench_weights_gloo RANK RANKS FILE BYTES`."""

# torch is partially annotated.
# pyright: reportUnknownMemberType=false

import json
import sys
import time

import torch
import torch.distributed as dist

ROUNDS = 3


def main(rank: int, ranks: int, store: str, length: int) -> None:
    """Broadcast some times, and say what the best one took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    content = torch.ones(length, dtype=torch.uint8)
    dist.broadcast(content[: 1 << 20], 0)
    walls: list[float] = []
    cpus: list[float] = []
    for _ in range(ROUNDS):
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        dist.broadcast(content, 0)
        dist.barrier()
        walls.append(time.perf_counter() - began)
        cpus.append(time.process_time() - cpu)
    print(json.dumps({"wall_s": min(walls), "cpu_s": min(cpus)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
