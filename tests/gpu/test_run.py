"""The GPU script's logic on the CPU at small sizes, and that it needs no library beyond torch and transformers.

Not covered: a GPU's kernels, memory counters and speed; only the script itself, run there, shows those.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.house.source import ROOT

MISSING = ("ray", "vllm", "pydantic", "pydantic_settings", "datasets", "trl", "peft", "wandb", "accelerate")
BLOCKER = f"""
import sys
sys.modules.update(dict.fromkeys({MISSING}))  # None: as if not installed
import tests.gpu.run
sys.exit(tests.gpu.run.main(["--small", "--out", sys.argv[1]]))
"""


def test_small_sizes_pass_without_other_libraries(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    ran = subprocess.run([sys.executable, "-c", BLOCKER, str(out)], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    found = json.loads(out.read_text())
    names = " ".join(check["name"] for check in found["checks"])
    for what in ("packed log-prob", "FSDP gradient", "activation_checkpointing", "cpu_offload", "objective gspo", "in advance"):
        assert what in names
    assert all(check["ok"] and check["error"] >= 0 for check in found["checks"])
    rates = {row["name"]: row for row in found["rows"]}
    assert sum("packed" in name for name in rates) == sum("padded" in name for name in rates) == 1
    assert all(row["tokens_per_s"] > 0 and row["share_of_peak"] > 0 for row in found["rows"] if "tokens_per_s" in row)
    assert sum(name.startswith("loss") for name in rates) == 3
