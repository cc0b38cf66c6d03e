"""Log-probabilities of chosen tokens from hidden states and the head: memory beyond what must be there, and time against full logits.

4,096 tokens, hidden size 1,024, a vocabulary of 151,936, float32, forward and backward pass with entropies, which training always shows.
The peers: full logits through autograd where they fit easily (1,024 tokens), and TRL's fused head (its `ChunkedLogProbFunction` as its
trainer calls it). The limit of the time is three matrix products at the rate of a large one in this run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from learner.logprob import chunked_logprobs
from tests.bench.measure import gemm_rate, peak_growth, seconds
from tests.bench.rows import Row, compare

TOKENS, HIDDEN, VOCABULARY, FEW = 4096, 1024, 151_936, 1024
PAIRS = 3
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, up: Tensor) -> Tensor:
    """As the learner calls it: the gradient of the loss per token is known from the token."""
    logp, _ = chunked_logprobs(hidden, weight, targets, upstream=lambda part, logp, entropy: (up[part], None))
    return (logp * up).sum()


def full(hidden: Tensor, weight: Tensor, targets: Tensor, up: Tensor) -> Tensor:
    """All logits, autograd's own backward pass; the entropy without gradient."""
    logp_NV = torch.log_softmax(hidden @ weight.t(), dim=-1)
    with torch.no_grad():
        _ = -torch.einsum("nv,nv->n", logp_NV.exp(), logp_NV)
    return (logp_NV.gather(-1, targets[:, None]).squeeze(-1) * up).sum()


def full_without_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, up: Tensor) -> Tensor:
    """All logits and nothing but the log-probabilities."""
    return (torch.log_softmax(hidden @ weight.t(), dim=-1).gather(-1, targets[:, None]).squeeze(-1) * up).sum()


def theirs(hidden: Tensor, weight: Tensor, targets: Tensor, up: Tensor) -> Tensor:
    """TRL's fused head."""
    from trl.trainer import utils

    fused, chunk = utils._ChunkedLogProbFunction, utils._CHUNKED_LOGPROB_CHUNK_SIZE
    logp = fused.apply(hidden, weight, None, targets, 1.0, chunk, None, 1.0, ("log_probs", "entropy"))[0]
    return (logp * up).sum()


class Problem:
    """Inputs of a size, and one forward and backward pass over them."""

    def __init__(self, tokens: int, vocabulary: int) -> None:
        rng = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(tokens, HIDDEN, generator=rng).requires_grad_()
        self.weight = (torch.randn(vocabulary, HIDDEN, generator=rng) * HIDDEN**-0.5).requires_grad_()
        self.targets = torch.randint(0, vocabulary, (tokens,), generator=rng)
        self.up = torch.randn(tokens, generator=rng) / tokens

    def run(self, loss: Loss) -> None:
        """The gradients stay in `.grad`."""
        self.hidden.grad = self.weight.grad = None
        loss(self.hidden, self.weight, self.targets, self.up).backward()

    def seconds(self, loss: Loss) -> float:
        """How long one takes."""
        return seconds(lambda: self.run(loss))

    def growth(self, loss: Loss) -> float:
        """GB at the peak beyond inputs, head weight and their gradients."""
        self.hidden.grad = self.weight.grad = None
        gc.collect()
        with peak_growth() as found:
            self.run(loss)
        return (found[0] - 4 * (self.hidden.numel() + self.weight.numel())) / 1e9


def run() -> list[Row]:
    """Memory at the full size, its growth with the vocabulary, then times."""
    many = Problem(TOKENS, VOCABULARY)
    Problem(64, 1000).run(ours)  # libraries' own buffers
    mine, other = many.growth(ours), many.growth(theirs)
    logits = 4 * TOKENS * VOCABULARY / 1e9
    note = f"peer: TRL; all logits once: {logits:.2f} GB"
    rows = [compare("loss_memory/peak", "GB", mine, other, higher_is_better=False, most=0.3, note=note)]
    del many
    small, large = (Problem(FEW, v).growth(ours) for v in (VOCABULARY // 2, VOCABULARY))
    note = f"peak at a vocabulary of {VOCABULARY} less that at {VOCABULARY // 2}, {FEW} tokens"
    rows.append(compare("loss_memory/growth_with_vocabulary", "GB", large - small, most=0.03, note=note))
    few = Problem(FEW, VOCABULARY)
    rate = gemm_rate(2048, 5)
    floor = 6.0 * FEW * HIDDEN * VOCABULARY / rate
    assert full_matches(few), "the gradients differ from those of full logits"
    ways: dict[str, Loss] = {"full_logits": full, "ours": ours, "trl": theirs}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(PAIRS):  # each peer next to ours, in alternating order
        for name in list(ways) if turn % 2 == 0 else reversed(list(ways)):
            times[name].append(few.seconds(ways[name]))
    note = f"{FEW} tokens, forward and backward with entropies; limit: three products at {rate / 1e9:.0f} GFLOP/s"
    own = times.pop("ours")
    for name, peer in times.items():
        rows.append(compare(f"loss_memory/time_{name}", "s", own, peer, limit=floor, higher_is_better=False, least_ratio=1.0, note=note))
    bare = few.seconds(full_without_entropy)
    note = "full logits where no entropy is asked for, for comparison"
    rows.append(compare("loss_memory/full_logits_without_entropy", "s", bare, note=note))
    return rows


def full_matches(few: Problem) -> bool:
    """Also warms both up."""
    few.run(full)
    want = few.hidden.grad
    few.run(ours)
    assert want is not None and few.hidden.grad is not None
    return bool((few.hidden.grad - want).norm() < 1e-4 * want.norm())
