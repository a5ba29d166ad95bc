"""The checks of a pull in the order of SPEC section 3, as faults put into a call that is right.

Each fault names the step that finds it.  Two faults in one call must give the error of the
earlier step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

STATUS = {
    "TypeError": None,
    "ParamInvalid": 0x5010B005,
    "KvCacheNotExist": 0x5010B002,
    "NotYetLink": 0x5010B007,
    "LlmTimeout": 0x5010B01A,
}

BASES = {
    "TypeError": "TypeError",
    "ParamInvalid": "ValueError",
    "KvCacheNotExist": "LookupError",
    "NotYetLink": "ConnectionError",
    "LlmTimeout": "TimeoutError",
}

UNKNOWN_LOCAL = 987_654
UNKNOWN_REMOTE = 876_543
UNKNOWN_CLUSTER = 765_432


@dataclass(frozen=True)
class Fault:
    name: str
    step: int
    kind: str
    changes: tuple[tuple[str, Any], ...]

    @property
    def keys(self) -> set[str]:
        """Arguments this fault needs; "index" and "ext" hide those that they are made of."""
        hidden = {
            "index": {"cluster_id", "src_id", "src_slot"},
            "ext": {"src_layers", "dst_layers", "per_layer"},
            "cache": {"dst", "dst_id"},
            "dst_id": {"dst", "cache"},
            "dst": {"dst_id", "cache"},
        }
        keys = {key for key, _ in self.changes}
        return keys.union(*(hidden.get(key, set()) for key in keys))


def fault(step: int, kind: str, **changes: Any) -> Fault:
    name = ",".join(f"{key}={value!r}" for key, value in changes.items())
    return Fault(f"{step}:{name}", step, kind, tuple(changes.items()))


TYPE_FAULTS = [
    fault(1, "TypeError", size="5"),
    fault(1, "TypeError", size=1.0),
    fault(1, "TypeError", size=None),
    fault(1, "TypeError", dst_slot="0"),
    fault(1, "TypeError", dst_slot=0.0),
    fault(1, "TypeError", src_slot="0"),
    fault(1, "TypeError", src_slot=0.5),
    fault(1, "TypeError", src_id="1"),
    fault(1, "TypeError", cluster_id="1"),
    fault(1, "TypeError", timeout_ms="100"),
    fault(1, "TypeError", per_layer=2.0),
    fault(1, "TypeError", per_layer="2"),
    fault(1, "TypeError", src_layers=3),
    fault(1, "TypeError", src_layers=(0, "1")),
    fault(1, "TypeError", dst_layers=(0.0, 1.0)),
    fault(1, "TypeError", dst_layers="01"),
    fault(1, "TypeError", index=(1, 2, 3)),
    fault(1, "TypeError", cache=7),
    fault(1, "TypeError", ext={"tensor_num_per_layer": 2}),
]

VALUE_FAULTS = [
    fault(2, "ParamInvalid", size=0),
    fault(2, "ParamInvalid", size=-2),
    fault(2, "ParamInvalid", src_slot=-1),
    fault(2, "ParamInvalid", dst_slot=-1),
    fault(2, "ParamInvalid", src_layers=(1, 0)),
    fault(2, "ParamInvalid", src_layers=(-1, 0)),
    fault(2, "ParamInvalid", dst_layers=(0, -1)),
    fault(2, "ParamInvalid", dst_layers=(-2, -2)),
    fault(2, "ParamInvalid", per_layer=0),
    fault(2, "ParamInvalid", per_layer=-1),
    fault(2, "ParamInvalid", timeout_ms=0),
    fault(2, "ParamInvalid", timeout_ms=-1),
]

LOCAL_FAULTS = [
    fault(3, "KvCacheNotExist", dst_id=UNKNOWN_LOCAL),
    fault(3, "KvCacheNotExist", dst_id=-1),
]

LINK_FAULTS = [fault(4, "NotYetLink", cluster_id=UNKNOWN_CLUSTER)]

# The call that is right: 12 tensors of shape (4, 64) on both sides.  The caches named here are
# made by the tests: "short" has slots of 32 bytes, "ten" 10 tensors, "other" another type.
GEOMETRY_FAULTS = [
    fault(6, "ParamInvalid", src_slot=4),
    fault(6, "ParamInvalid", src_slot=2**40),
    fault(6, "ParamInvalid", dst_slot=4),
    fault(6, "ParamInvalid", size=65),
    fault(6, "ParamInvalid", size=2**62),
    fault(6, "ParamInvalid", src_layers=(0, 6), dst_layers=(0, 6)),
    fault(6, "ParamInvalid", src_layers=(0, 2**31)),
    fault(6, "ParamInvalid", dst_layers=(6, 6)),
    fault(6, "ParamInvalid", src_layers=(0, 2)),
    fault(6, "ParamInvalid", dst_layers=(1, 5)),
    fault(6, "ParamInvalid", src_layers=(0, 1), dst_layers=(0, 2)),
    fault(6, "ParamInvalid", src_layers=(0, 0), dst_layers=(0, 0), per_layer=5),
    fault(6, "ParamInvalid", src_layers=(0, 0), dst_layers=(0, 0), per_layer=13),
    fault(6, "ParamInvalid", dst="ten"),
    fault(6, "ParamInvalid", dst="short"),
    fault(6, "ParamInvalid", dst="short", size=33),
    fault(6, "ParamInvalid", dst="other"),
]

# Of another cache of the owner: the test puts its id in.
REMOTE_FAULTS = [
    fault(5, "KvCacheNotExist", src_id=UNKNOWN_REMOTE),
    fault(5, "KvCacheNotExist", src_id="gone"),
    fault(5, "KvCacheNotExist", src_id="private"),
]

FAULTS = [
    *TYPE_FAULTS,
    *VALUE_FAULTS,
    *LOCAL_FAULTS,
    *LINK_FAULTS,
    *REMOTE_FAULTS,
    *GEOMETRY_FAULTS,
]


def compatible(faults: list[Fault]) -> list[tuple[Fault, Fault]]:
    """Pairs that can be put into one call, the earlier step first."""
    ordered = sorted(faults, key=lambda one: one.step)
    return [(a, b) for a, b in combinations(ordered, 2) if not a.keys & b.keys]


def call_with(base: dict[str, Any], *faults: Fault) -> dict[str, Any]:
    call = dict(base)
    for one in faults:
        for key, value in one.changes:
            call[key] = value
    return call
