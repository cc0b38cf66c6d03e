"""A real Prometheus scrapes a running training, and every query of the Grafana dashboard has a sample.

Needs Debian's `prometheus`: apt-get install -y --no-install-recommends prometheus. Does not cover Grafana itself, which draws the
same queries, and several nodes.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.operate.conftest import ROOT, RayHead, free_ports
from tests.operate.test_submit import SHORT

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PROMETHEUS is None, reason="needs Prometheus: apt-get install -y --no-install-recommends prometheus"),
]
CONFIG = """\
global: {{ scrape_interval: 5s, scrape_timeout: 5s }}
scrape_configs:
  - job_name: ray
    file_sd_configs:
      - files: [{folder}/prom_metrics_service_discovery.json]
"""


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus on loopback that scrapes the head's nodes, found as docs/operating.md has it: by Ray's own list."""

    url: str

    def samples(self, query: str) -> list[float]:
        """The values of an instant query now, NaN included."""
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=10) as answer:
            said = json.load(answer)
        assert said["status"] == "success", said
        return [float(found["value"][1]) for found in said["data"]["result"]]


@pytest.fixture
def prometheus(ray_head: RayHead, tmp_path: Path) -> Iterator[Prometheus]:
    (tmp_path / "prometheus.yml").write_text(CONFIG.format(folder=ray_head.temp))
    (port,) = free_ports(1)
    command = [
        str(PROMETHEUS), f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with open(tmp_path / "prometheus.log", "wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
    found = Prometheus(f"http://127.0.0.1:{port}")
    deadline = time.monotonic() + 30
    while True:
        try:
            found.samples("up")
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "prometheus.log").read_text()
            time.sleep(0.2)
    yield found
    process.terminate()
    process.wait(20)


def queries(run: str) -> list[str]:
    """Every query of the dashboard, for one run."""
    panels = json.loads((ROOT / "cluster" / "dashboards" / "winnow.json").read_text())["panels"]
    return [target["expr"].replace("$run", re.escape(run)) for panel in panels for target in panel.get("targets", [])]


def until_all(prometheus: Prometheus, asked: list[str], training: subprocess.Popen[str], seconds: float) -> dict[str, list[float]]:
    """The samples of every query, once each has one. Ray's nodes export every ten seconds."""
    deadline = time.monotonic() + seconds
    while True:
        found = {query: prometheus.samples(query) for query in asked}
        missing = [query for query, values in found.items() if not values]
        if not missing:
            return found
        assert training.poll() is None, f"the training is over, without {missing}"
        assert time.monotonic() < deadline, missing
        time.sleep(1.0)


def test_every_query_of_the_dashboard_has_a_sample(ray_head: RayHead, prometheus: Prometheus, tmp_path: Path) -> None:
    """The counts of faults and errors among them, which are there before anything has happened."""
    run_dir = tmp_path / "scraped"
    flags = [*SHORT, "--steps", "100000", "--max_staleness", "1", "--wandb", "off", "--display", "plain"]
    command = [ray_head.env["PATH"].split(":")[0] + "/python", "-u", "-m", "cluster.launch", "train", "arithmetic", *flags]
    training = subprocess.Popen(
        [*command, "--run_dir", str(run_dir), "--ray_address", ray_head.address],
        cwd=ROOT, env=ray_head.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        assert training.stdout is not None
        asked = queries(run_dir.name)
        assert len(asked) > 40
        counts = [query for query in asked if re.search("failed|errors|timeouts|nonfinite|empty|tokens_lost|surplus", query)]
        assert len(counts) > 8
        assert set(map(tuple, until_all(prometheus, counts, training, 150.0).values())) == {(0.0,)}
        for line in training.stdout:
            if re.search(r"^step 2/", line):
                break
        until_all(prometheus, asked, training, 120.0)
        logged = [json.loads(line)["reward"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert prometheus.samples(f'ray_winnow_reward{{run="{run_dir.name}"}}')[0] in logged
    finally:
        training.terminate()
        training.communicate(timeout=120)
    assert training.returncode == 130
