"""The weight-transfer backend that vLLM's factory imports; see :mod:`megatron.weight_sync.engines.vllm`."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from megatron.weight_sync.engines import vllm as adapter


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on: every call says where its answer goes."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    named: list = field(default_factory=list)


class WeightSyncEngine(WeightTransferEngine):
    """Init, start and finish have nothing to do: a payload is verified and applied whole in one update."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises what the receiver refused, after it was posted as the answer; vLLM passes it to the
        caller."""
        answer = adapter.serve(self.model, {"named": update_info.named}, self.vllm_config, self.device)
        if isinstance(answer, Exception):
            raise answer

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass
