"""The policy: a Hugging Face causal model, sharded by FSDP2, that gives log-probabilities of chosen tokens; and a model of values.

Shape legend: R rows, W tokens of a row, N chosen tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from learner.attention import NAME as SEGMENTS
from learner.attention import Segments, is_plain
from learner.logprob import Upstream, chunked_logprobs
from learner.lora import add_adapters, merged_weights
from rollout.errors import UserError

if TYPE_CHECKING:  # so that the model runs where there is no pydantic (tests/gpu)
    from learner.config import ModelConfig

M = TypeVar("M", bound=nn.Module)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy(nn.Module):
    """A causal model whose forward pass ends in log-probabilities, not logits.

    The head is applied inside this module's own forward, so that FSDP2's hooks of the root (which holds embedding,
    last norm and head) have gathered its weight.
    """

    def __init__(self, hf: PreTrainedModel, logit_chunk: int) -> None:
        super().__init__()
        self.hf = hf
        self.logit_chunk = logit_chunk

    def forward(
        self,
        input_RW: Tensor,
        position_RW: Tensor,
        flat_N: Tensor,
        target_N: Tensor,
        temperature: float = 1.0,
        with_entropy: bool = True,
        segments: Segments | None = None,
        upstream: Upstream | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`logp_N`, `entropy_N` (float32, nats) of the targets predicted at the positions `flat_N` of the R·W.

        Sequences in a row are kept apart by `segments`, without them by `position_RW`, which then restarts at 0 with each: this
        holds only without a key-value cache and without an attention mask. `upstream`: see `chunked_logprobs`.
        """
        hidden_NH = decode(self.hf.get_decoder(), input_RW, position_RW, flat_N, segments)
        weight_VH = self.hf.get_output_embeddings().weight
        return chunked_logprobs(
            hidden_NH,
            weight_VH,
            target_N,
            temperature=temperature,
            chunk=self.logit_chunk,
            with_entropy=with_entropy,
            upstream=upstream,
        )

    @property
    def hidden_size(self) -> int:
        """Width of the decoder."""
        return int(self.hf.config.get_text_config().hidden_size)


def decode(decoder: nn.Module, input_RW: Tensor, position_RW: Tensor, flat_N: Tensor, segments: Segments | None) -> Tensor:
    """The last hidden states [N, H] at the chosen positions. `segments` are for the attention that reads them; others are not told."""
    told = {}
    if decoder.config._attn_implementation == SEGMENTS:
        told["segments"] = segments or Segments.of_positions(position_RW)
    hidden_RWH = decoder(input_ids=input_RW, position_ids=position_RW, use_cache=False, **told).last_hidden_state
    return hidden_RWH.flatten(0, 1).index_select(0, flat_N)


class ValueModel(nn.Module):
    """The decoder of a causal model with a head of one number: the value of what stands before each chosen token.

    The head starts at zero, so that the first values are 0 whatever the number of ranks.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.decoder = hf.get_decoder()
        self.head = nn.Linear(int(hf.config.get_text_config().hidden_size), 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, input_RW: Tensor, position_RW: Tensor, flat_N: Tensor, segments: Segments | None = None) -> Tensor:
        """`value_N` (float32) at the positions `flat_N` of the R·W, which predict the chosen tokens."""
        hidden_NH = decode(self.decoder, input_RW, position_RW, flat_N, segments)
        return hidden_NH.float() @ self.head.weight.float()[0]


def build_tiny(folder: Path | str, config_kwargs: dict[str, Any], seed: int) -> None:
    """Write a randomly initialised Qwen3 as an ordinary float32 checkpoint; the tokenizer's files are the caller's.

    The same seed gives the same weights, whatever random numbers were drawn before.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**config_kwargs))
    model.save_pretrained(folder)


def pick_attention(name: str, device: torch.device, dtype: str, settings: Any) -> str:
    """The attention of transformers that a setting stands for, given the device, the compute dtype and the model's text config.

    `auto`: on a GPU flash-attention where it is installed; else `segments` where the model is plain (on a GPU also: computes in 16
    bits); else sdpa. Raises UserError where what is asked for cannot run.
    """
    from transformers.utils import is_flash_attn_2_available

    gpu, narrow = device.type == "cuda", dtype != "float32"
    can_flash, can_segments = gpu and is_flash_attn_2_available(), is_plain(settings) and (narrow or not gpu)
    if name == "auto":
        return "flash_attention_2" if can_flash and narrow else SEGMENTS if can_segments else "sdpa"
    if name == "flash_attention_2" and not can_flash:
        raise UserError(f"attention = {name!r} needs a GPU and flash-attn, and the learner is on {device.type}: use sdpa or auto")
    if name == "segments" and not can_segments:
        what = "a model with full causal attention in every layer" if not is_plain(settings) else "compute_dtype = bfloat16 on a GPU"
        raise UserError(f"attention = {name!r} needs {what}: use sdpa or auto")
    if name == "flash_attention_2" and not narrow:
        return "sdpa"  # flash-attention computes in 16 bits only
    return SEGMENTS if name == "segments" else name


def load_hf(model: str, config: ModelConfig, device: torch.device) -> PreTrainedModel:
    """A checkpoint (folder or hub name) in float32 on the CPU, dropout off, whole.

    Raises UserError where it cannot be loaded, or where its head is not `hidden · weightᵀ`.
    """
    transformers.utils.logging.disable_progress_bar()
    try:
        settings = AutoConfig.from_pretrained(model, trust_remote_code=config.trust_remote_code)
        for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
            if getattr(settings, name, 0):
                setattr(settings, name, 0.0)
        kernel = pick_attention(config.attention, device, config.compute_dtype, settings.get_text_config())
        hf = AutoModelForCausalLM.from_pretrained(
            model, config=settings, dtype=torch.float32, attn_implementation=kernel, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"model = {model!r} could not be loaded ({reason}): give the folder or hub name of a causal model") from error
    head = hf.get_output_embeddings()
    text = settings.get_text_config()
    odd = [n for n in ("final_logit_softcapping", "logit_scale", "logits_scaling") if getattr(text, n, None) not in (None, 1, 1.0)]
    if head is None or getattr(head, "bias", None) is not None or odd:
        what = ", ".join(odd) or "a head that is not one plain matrix"
        raise UserError(f"model = {model!r} has {what}, which the log-probabilities here do not know: use a model with a plain linear head")
    return hf


def make_mesh(device: torch.device, replicas: int = 1) -> DeviceMesh:
    """The mesh of all ranks, of one dimension, or of two with `replicas` copies of the model; the process group must exist."""
    ranks = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(device.type, (ranks,))
    return init_device_mesh(device.type, (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))


def load_policy(model: str, config: ModelConfig, *, mesh: DeviceMesh, device: torch.device, trainable: bool = True) -> Policy:
    """Load, freeze if not `trainable`, and shard each decoder layer and the root over the mesh.

    Gradients *sum* over ranks (FSDP2 would average), since the loss carries whole-step denominators. Weights, gradients
    and the optimiser's state are float32; the forward and backward pass run in `compute_dtype`.
    """
    hf = load_hf(model, config, device)
    hf.train()
    if trainable and config.lora_rank:
        add_adapters(hf, config.lora_rank, config.lora_alpha)
    else:
        hf.requires_grad_(trainable)
    policy = Policy(hf, config.logit_chunk)
    shard(policy, hf.get_decoder(), config, mesh=mesh)
    return place(policy, config, device)


def load_value(model: str, config: ModelConfig, *, mesh: DeviceMesh, device: torch.device) -> ValueModel:
    """A value model on the decoder of a checkpoint, trainable, sharded as the policy is."""
    hf = load_hf(model, config, device)
    hf.train()
    value = ValueModel(hf)
    shard(value, value.decoder, config, mesh=mesh)
    return place(value, config, device)


def place(model: M, config: ModelConfig, device: torch.device) -> M:
    """On the device; with `cpu_offload` only what is not sharded."""
    if device.type == "cpu":
        return model
    if not config.cpu_offload:
        return model.to(device)
    for buffers in (module._buffers for module in model.modules()):
        buffers.update({name: value.to(device) for name, value in buffers.items() if value is not None})
    return model


def check_value_model(value_model: str, model: str, trust_remote_code: bool) -> None:
    """Raises UserError where a checkpoint for the value model is not of the policy's architecture; reads their settings alone."""
    from learner.settings import SAME_SHAPE, other_shape  # here: it needs pydantic

    try:
        mine, policy = (AutoConfig.from_pretrained(m, trust_remote_code=trust_remote_code).get_text_config() for m in (value_model, model))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"value_model = {value_model!r} could not be loaded ({reason}): give a causal model like the policy's") from error
    shapes = ({name: getattr(model, name, None) for name in SAME_SHAPE} for model in (mine, policy))
    if wrong := other_shape(value_model, *shapes):
        raise UserError(wrong)


def shard(model: nn.Module, decoder: nn.Module, config: ModelConfig, *, mesh: DeviceMesh) -> None:
    """`fully_shard` every layer of its decoder, then the root, with gradients that sum over ranks.

    One rank has all weights: where it computes in their dtype and on their device too, FSDP2 would only copy weights and gradients
    (docs/performance.md has what that costs on CPUs), and is left out.
    """
    if config.activation_checkpointing:
        for layer in decoder.layers:
            # On the forward itself, inside FSDP2's hooks: the recomputation then does not run them again.
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    if mesh.size() == 1 and config.compute_dtype == "float32" and not config.cpu_offload:
        return
    mixed = MixedPrecisionPolicy(param_dtype=DTYPES[config.compute_dtype], reduce_dtype=torch.float32)
    where = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if config.cpu_offload else OffloadPolicy()
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed, reshard_after_forward=config.reshard_after_forward, offload_policy=where)
    fully_shard(model, mesh=mesh, mp_policy=mixed, reshard_after_forward=False, offload_policy=where)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def free_gathered(model: nn.Module) -> None:
    """Drop the root's gathered weights after a pass without gradient: the next pass must not meet old ones."""
    if isinstance(model, FSDPModule):
        model.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's shard; shares storage with the sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The tensor gathered from all ranks; a collective. On one rank it shares storage with the shard."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()  # one rank has it all, and copies nothing


def full_weights(policy: Policy, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every weight once, whole, in a fixed order, under its name in the model's state dict.

    Collective: all ranks must exhaust the iterator together, and each gets every tensor. A tied head is not repeated.
    `dtype` casts before the gathering. Adapters are merged.
    """
    if any(".lora_" in name for name, _ in policy.hf.named_parameters()):
        yield from merged_weights(policy.hf, dtype, whole)
        return
    for name, param in policy.hf.named_parameters():
        value = param.detach()
        if dtype is not None:
            value = value.to(dtype)
        yield name, whole(value)
