"""vLLM's weight-transfer API on top of mapped segments. Runs in each vLLM worker process.

One worker is one rank of tensor parallelism. An update has three calls, each made in all ranks:
`map_version`, so that a segment that is gone leaves every rank as it was; `update_weights`, in
which vLLM's own loaders take each rank's slices; and `applied_version`, by which the engine sees
that no rank lags behind.
"""

# vLLM's internals are untyped: the checks that strict mode adds say nothing here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeArgument=false

import glob
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from common.errors import ShardCorrupt, VersionGone
from common.messages.coordinator import Manifest
from common.weights import NO_VERSION
from services.rollout.segment import Segment


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on: each update names its file."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Load the version that was mapped."""

    version: int = NO_VERSION


class SegmentTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads a version from its segment; each rank takes its slices of every tensor.

    The parent process has checked the bytes already.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _mapped: Segment | None = None
    applied: tuple[int, str] = (NO_VERSION, "")
    """Version and digest of the content that this rank holds, by its own check."""

    def map_version(self, manifest: Manifest) -> bool:
        """Map a segment, the model untouched; False if it is gone or another file by now."""
        self._mapped = None
        try:
            self._mapped = Segment.open(manifest)
        except (VersionGone, ShardCorrupt):
            return False
        return True

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        unlink_shared_buffers()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        """The reload begins in `receive_weights`."""

    def finish_weight_update(self) -> None:
        """The reload ended in `receive_weights`."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Replace all weights, in the layout that this device's kernels want."""
        segment, self._mapped = self._mapped, None
        assert segment is not None, "map_version comes first"
        manifest = segment.manifest
        assert update_info.version == manifest.version, "another version is mapped"
        self.applied = (NO_VERSION, "")
        wanted = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        loaded: set[str] | None = self.model.load_weights(segment.tensors())  # pyright: ignore[reportCallIssue]
        finalize_layerwise_reload(self.model, self.model_config)
        if loaded is not None and (missing := sorted(wanted - loaded)):  # vLLM would only warn.
            raise ValueError(
                f"the version has nothing for {missing[0]} and {len(missing) - 1} more"
            )
        if self.device.type == "cpu":
            self._repack_output_embeddings()
        # Once more: had it been overwritten meanwhile, the weights were torn.
        self.applied = (manifest.version, segment.check())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, without its wait for an accelerator where there is none."""
        if self.device.type == "cpu":
            self.receive_weights(self.parse_update_info(update_info))
        else:
            super().update_weights(update_info)

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    def _repack_output_embeddings(self) -> None:
        """Pack the output embedding anew from its current weight.

        CPU kernels multiply with a packed copy of each weight. vLLM renews the copies of the
        layers that it loaded, and a tied `lm_head` is not loaded: it would go on with the
        embedding of the previous version, without an error.
        """
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)


def unlink_shared_buffers() -> None:
    """Remove the names of the buffers through which the ranks on this machine add up on a CPU.

    All ranks have them mapped by now, and names are removed by an orderly end only: each engine
    that was killed would leave 8 MiB in memory for ever.
    """
    if identity := os.environ.get("VLLM_DIST_IDENT"):
        for path in Path("/dev/shm").glob(f"{glob.escape(identity)}-*"):  # noqa: S108
            path.unlink(missing_ok=True)


class RankCalls:
    """Methods that every vLLM worker gets besides its own (`worker_extension_cls`).

    They do not raise where a rank may differ from the others: vLLM reads the ranks' answers one
    after the other, and would take those behind the one that raised for answers to its next call.
    """

    weight_transfer_engine: Any

    def map_version(self, manifest: dict[str, Any]) -> bool:
        """Whether this rank has the segment mapped now."""
        return self.weight_transfer_engine.map_version(Manifest.model_validate(manifest))

    def applied_version(self) -> tuple[int, str]:
        """Version and digest of what this rank decodes with."""
        return self.weight_transfer_engine.applied
