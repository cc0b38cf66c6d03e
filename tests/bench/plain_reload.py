"""The plain way of giving a running vLLM engine new weights: in its worker, a safetensors file between vLLM's layer-wise reload calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout.receive import WorkerExtension


class PlainExtension(WorkerExtension):
    """An extension of the worker that has both ways."""

    model_runner: Any

    def plain_reload(self, path: str) -> None:
        """Load a file of weights as vLLM loads a checkpoint."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
        from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

        model = self.model_runner.model
        assert Path(path).is_file()
        initialize_layerwise_reload(model)
        model.load_weights(safetensors_weights_iterator([path], use_tqdm_on_load=False))
        finalize_layerwise_reload(model, self.model_runner.model_config)
