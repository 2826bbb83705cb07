"""Checkpoints: a Hugging Face model directory with the optimizer's state beside it.

A checkpoint appears whole, by one rename, or not at all. `trainer.json` is its table of
contents; a directory that does not match its own is never loaded.

    checkpoints/step-000020/   config.json, model.safetensors, tokenizer files   (use it as is)
                               optimizer.safetensors, trainer.json               (to resume)
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import structlog
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

log = structlog.get_logger()

DIRECTORY = "checkpoints"
MODEL, OPTIMIZER, CONTENTS = "model.safetensors", "optimizer.safetensors", "trainer.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx")
"""Files of the model directory that hold weights, which the checkpoint has of its own."""
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Contents:
    """What `trainer.json` says."""

    step: int
    """Optimizer steps that the weights have seen."""
    lineage: int
    """Lineage that made them."""
    config: str
    """blake3 of the configuration, to see that a run was resumed with another one."""
    files: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes of every other file."""
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete one on disk."""

    path: Path
    contents: Contents


def save(
    run_dir: Path,
    contents: Contents,
    *,
    source: Path,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
) -> Path:
    """Write a checkpoint of the tensors, with the small files of the model directory `source`."""
    target = run_dir / DIRECTORY / f"step-{contents.step:06}"
    draft = target.with_name(f".{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and _belongs(file.name):
            shutil.copyfile(file, draft / file.name)
    save_file(_owned(model), draft / MODEL, metadata={"format": "pt"})
    save_file(_owned(optimizer), draft / OPTIMIZER)
    files = {file.name: file.stat().st_size for file in sorted(draft.iterdir())}
    table = asdict(contents) | {"files": files}
    (draft / CONTENTS).write_text(json.dumps(table, indent=1) + "\n")
    for file in draft.iterdir():
        _sync(file)
    _sync(draft)
    _replace(draft, target)
    log.info("checkpoint.saved", step=contents.step, bytes=sum(files.values()))
    return target


def latest(run_dir: Path) -> Checkpoint | None:
    """The newest complete checkpoint of a run."""
    return next(iter(_complete(run_dir)), None)


def prune(run_dir: Path, kept: int) -> None:
    """Remove all but the newest `kept` complete checkpoints, and drafts; nothing else.

    What somebody has put aside under a name of their own is theirs.
    """
    keep = {checkpoint.path for checkpoint in _complete(run_dir)[:kept]}
    for pattern in ("step-*", ".step-*"):
        for path in (run_dir / DIRECTORY).glob(pattern):
            if path not in keep and path.is_dir():
                shutil.rmtree(path)


def _complete(run_dir: Path) -> list[Checkpoint]:
    """Complete checkpoints, newest first."""
    found = [
        checkpoint
        for path in (run_dir / DIRECTORY).glob("step-*")
        if (checkpoint := _read(path)) is not None
    ]
    return sorted(found, key=lambda c: (c.contents.step, c.contents.lineage), reverse=True)


def _read(path: Path) -> Checkpoint | None:
    try:
        contents = Contents(**json.loads((path / CONTENTS).read_text()))
        sizes = {name: (path / name).stat().st_size for name in contents.files}
    except (OSError, ValueError, TypeError) as error:
        log.warning("checkpoint.ignored", path=str(path), reason=type(error).__name__)
        return None
    if contents.format != FORMAT or sizes != contents.files:
        log.warning("checkpoint.ignored", path=str(path), reason="torn")
        return None
    return Checkpoint(path, contents)


def _belongs(name: str) -> bool:
    return not name.endswith((*WEIGHT_SUFFIXES, ".index.json")) and name != CONTENTS


def _owned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(draft: Path, target: Path) -> None:
    """Move the draft into place; a torn or older checkpoint of the same step makes room."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    draft.rename(target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)
