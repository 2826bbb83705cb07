"""vLLM's weight-transfer API on top of mapped segments. Runs in each vLLM worker process."""

# vLLM's internals are untyped: the checks that strict mode adds say nothing here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeArgument=false

from dataclasses import dataclass, field
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

from common.messages.coordinator import Manifest
from services.rollout.segment import Segment


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on: each update names its file."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One complete version."""

    manifest: dict[str, Any] = field(default_factory=dict[str, Any])


class SegmentTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads a version from its segment; each rank takes its shards of every tensor.

    The parent process has checked the bytes already. The file is mapped before the model is
    touched, so a missing file leaves the old weights in place.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        """The reload begins in `receive_weights`, once the segment is mapped."""

    def finish_weight_update(self) -> None:
        """The reload ended in `receive_weights`."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Replace all weights, in the layout that this device's kernels want."""
        segment = Segment.open(Manifest.model_validate(update_info.manifest))
        wanted = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        loaded: set[str] | None = self.model.load_weights(segment.tensors())  # pyright: ignore[reportCallIssue]
        finalize_layerwise_reload(self.model, self.model_config)
        if loaded is not None and (missing := sorted(wanted - loaded)):  # vLLM would only warn.
            raise ValueError(
                f"the version has nothing for {missing[0]} and {len(missing) - 1} more"
            )
        segment.check()  # Once more: had it been overwritten meanwhile, the weights were torn.
        if self.device.type == "cpu":
            self._repack_output_embeddings()

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
