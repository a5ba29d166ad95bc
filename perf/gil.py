"""What a busy owner costs the pulls from it.

The owner's main thread runs a pure-Python loop and keeps the GIL; pulls are compared with those
from an idle owner ("get") or with those beside a separate process that is as busy and has no
Python ("stream": there the owner's service thread needs the core that the loop has).

    python perf/gil.py [--path get|stream] [--seconds S] [--json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from children import actions, serving
from harness import Peer

TENSORS, SHAPE = 32, (1, 2 << 20)


def throughput(puller: Peer, cache_id: int, seconds: float) -> float:
    """Bytes per second of pulls one after the other."""
    result = puller.call(serving.pull_for, "kv", 1, cache_id, seconds, timeout=seconds + 30)
    return float(result)


def measure(path: str, seconds: float) -> dict[str, object]:
    with (
        Peer(1, path=path, name="owner") as owner,
        Peer(2, path=path, name="puller", listen=False) as puller,
    ):
        puller.link(owner)
        cache_id = owner.call(actions.make_cache, "kv", TENSORS, SHAPE, seed=1)
        puller.call(actions.make_cache, "kv", TENSORS, SHAPE, access="")
        throughput(puller, cache_id, 0.5)
        idle, busy = [], []
        # Alternating, so that a slow moment of the machine meets both.
        for _ in range(3):
            if path == "get":
                idle.append(throughput(puller, cache_id, seconds))
            else:
                spinner = subprocess.Popen(["sh", "-c", "while :; do :; done"])
                try:
                    idle.append(throughput(puller, cache_id, seconds))
                finally:
                    spinner.kill()
                    spinner.wait()
            loop = owner.start_main(actions.busy, seconds + 0.2, seconds + 5)
            busy.append(throughput(puller, cache_id, seconds))
            loop.result()
    base, loaded = max(idle), max(busy)
    return {
        "path": path,
        "compared_with": "an idle owner" if path == "get" else "a busy process beside it",
        "base_gb_per_s": round(base / 1e9, 3),
        "busy_owner_gb_per_s": round(loaded / 1e9, 3),
        "ratio": round(loaded / base, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", choices=["get", "stream"], action="append")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = [measure(path, options.seconds) for path in options.path or ["get", "stream"]]
    if options.json:
        print(json.dumps(results))
    else:
        for result in results:
            print(
                f"{result['path']}: {result['busy_owner_gb_per_s']} GB/s with a busy owner, "
                f"{result['base_gb_per_s']} GB/s with {result['compared_with']}: "
                f"ratio {result['ratio']}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
