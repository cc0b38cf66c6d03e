"""The policy: a Hugging Face causal model, sharded by FSDP2, that gives log-probabilities of chosen tokens; and a model of values.

Shape legend: R rows, W tokens of a row, N chosen tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from learner.config import ModelConfig
from learner.logprob import chunked_logprobs
from learner.settings import SAME_SHAPE, other_shape
from rollout.errors import UserError

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
        self, input_RW: Tensor, position_RW: Tensor, flat_N: Tensor, target_N: Tensor, temperature: float = 1.0, with_entropy: bool = True
    ) -> tuple[Tensor, Tensor]:
        """`logp_N`, `entropy_N` (float32, nats) of the targets predicted at the positions `flat_N` of the R·W.

        Sequences in a row are kept apart by `position_RW`, which restarts at 0 with each: this holds only without a
        key-value cache and without an attention mask.
        """
        decoder = self.hf.get_decoder()
        hidden_RWH = decoder(input_ids=input_RW, position_ids=position_RW, use_cache=False).last_hidden_state
        hidden_NH = hidden_RWH.flatten(0, 1).index_select(0, flat_N)
        weight_VH = self.hf.get_output_embeddings().weight
        return chunked_logprobs(
            hidden_NH, weight_VH, target_N, temperature=temperature, chunk=self.logit_chunk, with_entropy=with_entropy
        )

    @property
    def hidden_size(self) -> int:
        """Width of the decoder."""
        return int(self.hf.config.get_text_config().hidden_size)


class ValueModel(nn.Module):
    """The decoder of a causal model with a head of one number: the value of what stands before each chosen token.

    The head starts at zero, so that the first values are 0 whatever the number of ranks.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.decoder = hf.get_decoder()
        self.head = nn.Linear(int(hf.config.get_text_config().hidden_size), 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, input_RW: Tensor, position_RW: Tensor, flat_N: Tensor) -> Tensor:
        """`value_N` (float32) at the positions `flat_N` of the R·W, which predict the chosen tokens."""
        hidden_RWH = self.decoder(input_ids=input_RW, position_ids=position_RW, use_cache=False).last_hidden_state
        hidden_NH = hidden_RWH.flatten(0, 1).index_select(0, flat_N)
        return hidden_NH.float() @ self.head.weight.float()[0]


def build_tiny(folder: Path | str, config_kwargs: dict[str, Any], seed: int) -> None:
    """Write a randomly initialised Qwen3 as an ordinary float32 checkpoint; the tokenizer's files are the caller's.

    The same seed gives the same weights, whatever random numbers were drawn before.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**config_kwargs))
    model.save_pretrained(folder)


def pick_attention(name: str, device: torch.device) -> str:
    """The attention kernel that `auto` stands for on this device.

    Raises UserError where flash-attention is asked for and cannot run.
    """
    from transformers.utils import is_flash_attn_2_available

    can_flash = device.type == "cuda" and is_flash_attn_2_available()
    if name == "auto":
        return "flash_attention_2" if can_flash else "sdpa"
    if name == "flash_attention_2" and not can_flash:
        raise UserError(f"attention = {name!r} needs a GPU and flash-attn, and the learner is on {device.type}: use sdpa or auto")
    return name


def load_hf(model: str, config: ModelConfig, device: torch.device) -> PreTrainedModel:
    """A checkpoint (folder or hub name) in float32 on the CPU, dropout off, whole.

    Raises UserError where it cannot be loaded, or where its head is not `hidden · weightᵀ`.
    """
    transformers.utils.logging.disable_progress_bar()
    kernel = pick_attention(config.attention, device)
    if kernel == "flash_attention_2" and config.compute_dtype == "float32":
        kernel = "sdpa"  # flash-attention computes in 16 bits only
    try:
        settings = AutoConfig.from_pretrained(model, trust_remote_code=config.trust_remote_code)
        for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
            if getattr(settings, name, 0):
                setattr(settings, name, 0.0)
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


def make_mesh(device: torch.device) -> DeviceMesh:
    """The one-dimensional mesh of all ranks; the process group must exist."""
    return init_device_mesh(device.type, (dist.get_world_size(),))


def load_policy(model: str, config: ModelConfig, *, mesh: DeviceMesh, device: torch.device, trainable: bool = True) -> Policy:
    """Load, freeze if not `trainable`, and shard each decoder layer and the root over the mesh.

    Gradients *sum* over ranks (FSDP2 would average), since the loss carries whole-step denominators. Weights, gradients
    and the optimiser's state are float32; the forward and backward pass run in `compute_dtype`.
    """
    hf = load_hf(model, config, device)
    hf.train()
    hf.requires_grad_(trainable)
    policy = Policy(hf, config.logit_chunk)
    shard(policy, hf.get_decoder(), config, mesh=mesh)
    return policy.to(device) if device.type != "cpu" else policy


def load_value(model: str, config: ModelConfig, *, mesh: DeviceMesh, device: torch.device) -> ValueModel:
    """A value model on the decoder of a checkpoint, trainable, sharded as the policy is."""
    hf = load_hf(model, config, device)
    hf.train()
    value = ValueModel(hf)
    shard(value, value.decoder, config, mesh=mesh)
    return value.to(device) if device.type != "cpu" else value


def check_value_model(value_model: str, model: str, trust_remote_code: bool) -> None:
    """Raises UserError where a checkpoint for the value model is not of the policy's architecture; reads their settings alone."""
    try:
        mine, policy = (AutoConfig.from_pretrained(m, trust_remote_code=trust_remote_code).get_text_config() for m in (value_model, model))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"value_model = {value_model!r} could not be loaded ({reason}): give a causal model like the policy's") from error
    shapes = ({name: getattr(model, name, None) for name in SAME_SHAPE} for model in (mine, policy))
    if wrong := other_shape(value_model, *shapes):
        raise UserError(wrong)


def shard(model: nn.Module, decoder: nn.Module, config: ModelConfig, *, mesh: DeviceMesh) -> None:
    """`fully_shard` every layer of its decoder, then the root, with gradients that sum over ranks."""
    mixed = MixedPrecisionPolicy(param_dtype=DTYPES[config.compute_dtype], reduce_dtype=torch.float32)
    for layer in decoder.layers:
        if config.activation_checkpointing:
            # On the forward itself, inside FSDP2's hooks: the recomputation then does not run them again.
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        fully_shard(layer, mesh=mesh, mp_policy=mixed, reshard_after_forward=config.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=mixed, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def free_gathered(model: nn.Module) -> None:
    """Drop the root's gathered weights after a pass without gradient: the next pass must not meet old ones."""
    assert isinstance(model, FSDPModule)
    model.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's shard; shares storage with the sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_weights(policy: Policy, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every weight once, whole, in a fixed order, under its name in the model's state dict.

    Collective: all ranks must exhaust the iterator together, and each gets every tensor. A tied head is not repeated.
    `dtype` casts before the gathering.
    """
    for name, param in policy.hf.named_parameters():
        value = param.detach()
        if dtype is not None:
            value = value.to(dtype)
        yield name, value.full_tensor() if isinstance(value, DTensor) else value
