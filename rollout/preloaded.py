"""What a core on CPUs imports until it can generate: imported once, in the process that cores are forked from (`rollout/forkserver.py`).

Its objects leave the garbage collector's sight, which vLLM calls three times while a core starts, at half a second each.
"""

import gc

import vllm.model_executor.layers.quantization.online.base
import vllm.v1.engine.core
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401

import rollout.receive  # noqa: F401

gc.collect()
gc.freeze()
