"""Everything that a linked peer can say over the data plane, to an engine that goes on working.

By hand, for as long as you like::

    python tests/fuzz/test_fuzz_native.py --inputs 1000000 --seed 7
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from children import actions, harassed, malice, serving
from harness import SCALE, Peer, wait_until

HIDDEN = ("friends", "hidden", "private", "outgoing", "sink")
INPUTS = round(5_000 * SCALE)
VICTIM, FRIEND, EVIL = 1, 2, 66
IDS = (1, 2)  # of its caches, as malice.OWN numbers them
# What one peer may have the owner keep (block numbers of requests and offers), and UCX's pools.
MOST_GROWTH = 160 << 20


def fuzz(inputs: int, seed: int) -> dict[str, Any]:
    """Attack an engine, and check everything that is promised; what was said and done."""
    with (
        Peer(VICTIM, name="victim", fresh=True) as victim,
        Peer(FRIEND, name="friend", listen=False) as friend,
        Peer(EVIL, name="evil", engine=False, fresh=True) as evil,
    ):
        guesses = victim.call(harassed.build)
        cache_id = guesses["friends"]["cache_id"]
        friend.link(victim)
        friend.call(actions.make_cache, "kv", 4, (1, 50_000), access="")
        address = evil.call(malice.open_evil, EVIL)
        unknown = [guesses[name] for name in HIDDEN]
        running = evil.start(malice.attack, VICTIM, unknown, seed, inputs)
        victim.call(actions.link, EVIL, address)
        before = victim.sample()
        pulling = friend.start(serving.pull_until_told, "kv", VICTIM, cache_id)
        suffering = victim.start(harassed.suffer, EVIL, IDS, seed)
        began = time.monotonic()
        evil.side(malice.begin)
        said = running.result(60 + inputs / 1000)
        seconds = time.monotonic() - began
        after = victim.sample()
        victim.side(harassed.finish)
        friend.side(serving.finish)
        suffered = suffering.result()
        served = pulling.result()
        state = victim.call(actions.links)[EVIL]
        evil.call(malice.close_evil)
        wait_until(lambda: victim.call(actions.links).get(EVIL, "down") == "down")
        assert said["leaks"] == [], said["leaks"][:5]
        assert victim.call(harassed.changed) == []
        assert suffered["problems"] == []
        assert served["problems"] == []
        assert served["pulls"] > 10
        assert state == "up", state
        assert friend.call(actions.pull_checked, "kv", VICTIM, cache_id, 1).extra["wrong"] == []
        assert after.rss - before.rss < MOST_GROWTH, (before, after)
        assert after.fds <= before.fds + 10, (before, after)
    return {**said, **suffered, "seconds": seconds, "rss": (before.rss, after.rss), **served}


def test_malicious_peer() -> None:
    found = fuzz(INPUTS, 7)
    # It has been believed now and then, or all this would show little.  What the victim asks of it
    # in so short a time is a matter of luck.
    for name in ("PONG", "DATA", "END", "REQUEST", "OFFER", "ANSWER", "ECHO"):
        assert found["got"].get(name), (name, found)
    assert found["got"].get("taken offers"), found
    assert any(name.endswith(": ok") for name in found["ends"]), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    found = fuzz(asked.inputs, asked.seed)
    for name in ("sent", "got", "ends"):
        print(
            f"{name}: " + ", ".join(f"{key} {value}" for key, value in sorted(found[name].items()))
        )
    rss = " -> ".join(f"{value >> 20} MiB" for value in found["rss"])
    print(f"{found['seconds']:.0f} s, memory {rss}, a friend's pulls {found['pulls']}", end=", ")
    print(f"the slowest {found['slowest'] * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
