"""How fast the rollout viewer lists: a store of 100,000 synthetic rollouts behind `openenv view`, asked over HTTP.

python benchmarks/viewer.py [COUNT]     # prints a table of medians and 95th percentiles
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx2

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from stored_rollouts import fill_store  # noqa: E402

REQUESTS = {
    "list, newest": "rollouts?limit=100",
    "list, in the middle": "rollouts?limit=100&offset=50000",
    "list, at its end": "rollouts?limit=100&offset=99900",
    "list, by reward": "rollouts?limit=100&order=reward",
    "one task": "rollouts?limit=100&task=task-007",
    "status and reward": "rollouts?limit=100&status=ok&min_reward=0.5",
    "any text": "rollouts?limit=100&text=task-19",
    "pass rates by task": "rollouts/-/stats?by=task",
    "one rollout": "rollouts/000000000000c350",
}
TIMES = 30


def main() -> None:
    """Fill a store, serve it, ask."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as folder:
        fill_store(Path(folder), count)
        command = [sys.executable, "-m", "openenv", "view", folder, "--port", "0"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None
            url = next(found.group() for line in server.stderr if (found := re.search(r"http://\S+/web/", line)))
            with httpx2.Client(base_url=url, trust_env=False, timeout=600) as client:
                began = time.perf_counter()
                client.get("rollouts?limit=1").raise_for_status()
                print(f"{count} rollouts; the index was made in {time.perf_counter() - began:.1f} s\n")
                print("| request | first ms | median ms | 95 % ms |\n|---|---:|---:|---:|")
                for name, path in REQUESTS.items():
                    spent = [_ask(client, path) for _ in range(TIMES)]
                    rest = sorted(spent[1:])
                    late = rest[int(len(rest) * 0.95)]
                    print(f"| {name} | {spent[0]:.1f} | {statistics.median(rest):.1f} | {late:.1f} |")
        finally:
            server.terminate()
            server.wait(20)


def _ask(client: httpx2.Client, path: str) -> float:
    began = time.perf_counter()
    client.get(path).raise_for_status()
    return (time.perf_counter() - began) * 1000


if __name__ == "__main__":
    main()
