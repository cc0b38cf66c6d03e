"""The manifest and the script under cluster/deploy: parsed, their command lines accepted, their numbers fit, the script run with stand-ins.

Does not cover: Kubernetes, KubeRay and Slurm themselves, which are not to be had here.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import load, packing, placement
from cluster.config import RunConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "cluster" / "deploy"
SCRIPT = DEPLOY / "slurm.sh"


def accepted(line: str) -> RunConfig:
    """The config of `… train RECIPE [flags]`, by our own parser."""
    words = shlex.split(line)
    flags, recipes = load.parse_flags(words[words.index("train") + 1 :])
    return load.resolve(recipes[0], flags)


@pytest.fixture
def spec() -> Any:
    manifest = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    return manifest["spec"]


def test_the_manifest_s_run_is_accepted_and_goes_on_by_itself(spec: Any) -> None:
    assert spec["entrypoint"].startswith("python -m cluster.launch train ")
    cfg = accepted(spec["entrypoint"])
    assert cfg.resume == "auto" and str(cfg.run_dir).startswith("/")
    assert spec["rayClusterSpec"]["rayVersion"] == metadata.version("ray")
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}


def test_the_manifest_s_pods_hold_its_run(spec: Any) -> None:
    """Its numbers agree: engines, ranks and verifiers find their places on the head and the workers that it asks for."""
    cluster = spec["rayClusterSpec"]
    head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    (group,) = cluster["workerGroupSpecs"]
    worker = group["template"]["spec"]["containers"][0]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
    limits = worker["resources"]["limits"]
    nodes = [{"CPU": float(head["resources"]["limits"]["cpu"])}]
    nodes += [{"CPU": float(limits["cpu"]), "GPU": float(limits["nvidia.com/gpu"])}] * group["replicas"]
    cfg = accepted(spec["entrypoint"])
    assert packing.why_not(placement.bundles(cfg), placement.counts(cfg), nodes) is None
    assert sum(node.get("GPU", 0) for node in nodes) == cfg.rollout.engines + cfg.model.learner_ranks


def test_every_pod_has_the_shared_folder_the_keys_and_no_secret_in_the_manifest(spec: Any) -> None:
    cluster = spec["rayClusterSpec"]
    for template in (cluster["headGroupSpec"]["template"], *(g["template"] for g in cluster["workerGroupSpecs"])):
        (container,) = template["spec"]["containers"]
        mounted = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        assert mounted.keys() == {v["name"] for v in template["spec"]["volumes"]}
        assert mounted["shared"] == "/shared" and mounted["shm"] == "/dev/shm"
        assert container["envFrom"] == [{"secretRef": {"name": "winnow-keys", "optional": True}}]
        assert not [e["name"] for e in container["env"] if re.search("KEY|SECRET|TOKEN|PASSWORD", e["name"])]


def test_the_script_is_sound_bash() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    assert os.access(SCRIPT, os.X_OK)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


STAND_INS = {
    "scontrol": 'echo "scontrol $*" >> "$TRACE"; printf "node1\\nnode2\\nnode3\\n"',
    "srun": 'while [[ "$1" == --* ]]; do [[ "$1" == --nodelist=* ]] && node=${1#--nodelist=}; shift; done; NODE=$node exec "$@"',
    "ray": 'echo "$NODE ray $* token=$(stat -c %a "$RAY_AUTH_TOKEN_PATH") mode=$RAY_AUTH_MODE" >> "$TRACE"\n'
    'if [ "$1" = start ]; then trap "echo $NODE ends >> $TRACE; exit 0" TERM; while :; do sleep 0.1; done; fi',
    "python": 'if [ "$1" = -c ]; then exec "$REAL" "$@"; fi\n'
    'echo "run $*" >> "$TRACE"; trap "echo told >> $TRACE; sleep 0.5; exit 130" TERM; while :; do sleep 0.1; done',
}


def test_the_script_starts_every_node_and_hands_a_signal_to_the_run(tmp_path: Path) -> None:
    """With stand-ins for Slurm, Ray and the run, which write down what they are asked."""
    stand_ins, trace = tmp_path / ".venv" / "bin", tmp_path / "trace"
    stand_ins.mkdir(parents=True)
    for name, text in STAND_INS.items():
        (stand_ins / name).write_text(f"#!/bin/bash\n{text}\n")
        (stand_ins / name).chmod(0o755)
    env = {"PATH": f"{stand_ins}:/usr/bin:/bin", "TRACE": str(trace), "REAL": sys.executable, "SLURM_SUBMIT_DIR": str(tmp_path)}
    env |= {"SLURM_JOB_NODELIST": "node[1-3]", "SLURM_JOB_ID": "7"}
    line = ["gsm8k_qwen3", "--engines", "12", "--run_dir", "/shared/a b"]
    job = subprocess.Popen([SCRIPT, *line], cwd=tmp_path, env=env, start_new_session=True)
    try:
        deadline = time.monotonic() + 30
        while "run -m" not in (trace.read_text() if trace.exists() else "") and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.3)
        job.send_signal(signal.SIGTERM)
        assert job.wait(30) == 130
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    said = trace.read_text().splitlines()
    started = sorted(row for row in said if " ray start " in row)
    assert len(started) == 3 and all("token=600 mode=token" in row for row in started)
    assert re.match(r"node1 ray start --head --block .*--port 26379 --dashboard-host 127.0.0.1 ", started[0])
    assert [row.split()[0] for row in started[1:]] == ["node2", "node3"] and all("--address node1:26379" in row for row in started[1:])
    (run,) = (row for row in said if row.startswith("run "))
    cfg = accepted(run.replace("/shared/a b", "/shared/a"))
    assert (cfg.rollout.engines, cfg.cluster.ray_address, cfg.cluster.autoscaling, cfg.resume) == (12, "node1:26379", True, "auto")
    assert said.index("told") > said.index(run) and sorted(said[-3:]) == ["node1 ends", "node2 ends", "node3 ends"]
    assert list(tmp_path.glob(".ray-token*")) == []


def test_the_script_wants_a_run_folder_that_outlives_it(tmp_path: Path) -> None:
    done = subprocess.run([SCRIPT, "gsm8k_qwen3"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "--run_dir" in done.stderr
