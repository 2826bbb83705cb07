"""The learner of one rank: loaded, sharded over all ranks, and gathered again for a checkpoint."""

# torch and transformers are partially annotated; what they return is annotated here by hand.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from common.config import Config
from services.trainer.checkpoint import OPTIMIZER
from services.trainer.model import Policy, load_policy
from services.trainer.step import Learner

COLLECTIVE_TIMEOUT_S = 300.0
"""Longer than the difference between the fastest and the slowest rank of a step."""
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW remembers of a parameter."""


def build_policy(config: Config, model_path: Path, *, rank: int) -> Policy:
    """Load the model onto the device of one rank."""
    torch.set_num_threads(config.training.threads)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    return load_policy(model_path).to(device)


def build_learner(
    policy: Policy,
    config: Config,
    model_path: Path,
    *,
    resume: bool,
    rank: int,
    rendezvous: Path | None,
) -> Learner:
    """Make the learner of one rank; with a rendezvous directory, shard the model over all ranks."""
    if rendezvous is not None:
        _shard(policy, policy.model.device, rank, config.training.ranks, rendezvous)
    learner = Learner(policy, config, rank=rank, ranks=config.training.ranks)
    if resume:
        restore_optimizer(learner, load_file(model_path / OPTIMIZER))
    return learner


def full_state(learner: Learner) -> dict[str, Tensor]:
    """The model's whole state dict; a collective with several ranks."""
    state: dict[str, Tensor] = learner.policy.model.state_dict(keep_vars=True)
    gathered: dict[int, Tensor] = {}
    for tensor in state.values():  # Tied weights are one parameter, and stay one tensor.
        if id(tensor) not in gathered:
            gathered[id(tensor)] = _full(tensor.detach())
    return {name: gathered[id(tensor)] for name, tensor in state.items()}


def optimizer_state(learner: Learner) -> dict[str, Tensor]:
    """`<parameter>.<moment>` of each parameter that was updated; a collective."""
    state: dict[str, Tensor] = {}
    for name, parameter in learner.policy.model.named_parameters():
        for moment, value in learner.optimizer.state.get(parameter, {}).items():
            state[f"{name}.{moment}"] = _full(value)
    return state


def restore_optimizer(learner: Learner, state: Mapping[str, Tensor]) -> None:
    """Inverse of `optimizer_state`."""
    for name, parameter in learner.policy.model.named_parameters():
        if f"{name}.step" not in state:
            continue
        learner.optimizer.state[parameter] = {
            moment: _like(parameter, state[f"{name}.{moment}"]) for moment in MOMENTS
        }


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    if not value.dim() and parameter.dim():  # AdamW counts its steps on the CPU, unsharded.
        return value
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)
    return value.to(parameter.device)


def _shard(policy: Policy, device: torch.device, rank: int, ranks: int, rendezvous: Path) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # All ranks are children of one process.
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(str(rendezvous / "store"), ranks),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    mesh = init_device_mesh(device.type, (ranks,))
    layers = set(policy.model._no_split_modules or ())  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    for module in policy.model.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh)
    fully_shard(policy, mesh=mesh)
