"""One rank of test_invariance.test_real_ranks: `invariance_worker.py RANK WORLD STORE`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
import torch.distributed as dist

spec = importlib.util.spec_from_file_location("test_invariance", Path(__file__).with_name("test_invariance.py"))
assert spec is not None and spec.loader is not None
cases = importlib.util.module_from_spec(spec)
sys.modules["test_invariance"] = cases
spec.loader.exec_module(cases)

# Rank 1's answer is masked as a whole, and rank 2 of three has no answer in its second micro-batch, or none at all.
SHARES = {3: [[[1, 0], [4]], [[3]], [[5, 2], []]], 2: [[[3], []], [[0, 5], [4, 2, 1]]]}


def main() -> None:
    """Compare the sum over ranks with the whole step, for every aggregation, over 3 and over 2 ranks."""
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    pair = dist.new_group([0, 1])
    for ranks, group in ((3, dist.group.WORLD), (2, pair)):
        for mode in cases.MODES if rank < ranks else ():
            step = cases.example_step(mode)
            whole = cases.evaluate(step, [list(range(6))], packed=False)
            mine = cases.evaluate(step, SHARES[ranks][rank], packed=rank % 2 == 0)
            grads = torch.cat(mine.grads)
            dist.all_reduce(grads, group=group)
            vectors = mine.sums.to_vectors()
            for vector, op in zip(vectors, (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN), strict=True):
                dist.all_reduce(vector, op=op, group=group)
            sums = cases.ObjectiveSums.from_vectors(*vectors)
            parts = cases.Result(sums.loss.item(), sums.abs_terms.item(), [grads], sums)
            cases.agree(cases.Result(whole.loss, whole.scale, [torch.cat(whole.grads)], whole.sums), parts, 1e-10)
            if rank == 0:
                print(f"{mode}:{ranks}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
