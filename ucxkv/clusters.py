"""Checks of the clusters that a caller names."""

from __future__ import annotations

from typing import Any

from ucxkv import numbers
from ucxkv.errors import ParamInvalid
from ucxkv.types import ClusterInfo, IpInfo, LlmRole


def clusters_of(clusters: Any) -> list[ClusterInfo]:
    """A sequence of ClusterInfo with everything in it checked; TypeError or ParamInvalid."""
    if isinstance(clusters, ClusterInfo) or not hasattr(clusters, "__iter__"):
        raise TypeError("clusters must be a sequence of ClusterInfo")
    return [_cluster(cluster) for cluster in clusters]


def _cluster(cluster: Any) -> ClusterInfo:
    """`cluster` with everything in it checked."""
    if not isinstance(cluster, ClusterInfo):
        raise TypeError(f"clusters must hold ClusterInfo, not {type(cluster).__name__}")
    if cluster.remote_role is not None and not isinstance(cluster.remote_role, LlmRole):
        raise TypeError("remote_role must be an LlmRole or None")
    return ClusterInfo(
        cluster_number(cluster.remote_cluster_id),
        _addresses(cluster.remote_ip_infos, "remote_ip_infos"),
        cluster.remote_role,
        _addresses(cluster.local_ip_infos, "local_ip_infos"),
    )


def cluster_number(value: Any) -> int:
    """A cluster id: an integer from 0 to 2**63 - 1."""
    number = numbers.integer(value, "cluster_id")
    if not 0 <= number < 1 << 63:
        raise ParamInvalid(f"cluster_id must be from 0 to 2**63 - 1, not {number}")
    return number


def cluster_numbers(values: Any) -> frozenset[int]:
    """A collection of cluster ids; TypeError or ParamInvalid."""
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise TypeError("peers must be a collection of cluster ids")
    return frozenset(cluster_number(value) for value in values)


def _addresses(infos: Any, name: str) -> tuple[IpInfo, ...]:
    if isinstance(infos, IpInfo) or not hasattr(infos, "__iter__"):
        raise TypeError(f"{name} must be a sequence of IpInfo")
    checked = []
    for info in infos:
        if not isinstance(info, IpInfo) or not isinstance(info.ip, str):
            raise TypeError(f"{name} must hold IpInfo with an address or a name")
        port = numbers.integer(info.port, "port")
        if not 0 <= port <= 65535:
            raise ParamInvalid(f"port must be from 0 to 65535, not {port}")
        checked.append(IpInfo(info.ip, port))
    return tuple(checked)
