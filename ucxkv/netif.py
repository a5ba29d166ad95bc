"""Which network interface has a local address."""

from __future__ import annotations

import ipaddress
import socket

import psutil

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse(text: str) -> _Address:
    """An address without its scope; one that maps IPv4 into IPv6 comes as IPv4."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def interface_of(local: str) -> str | None:
    """The interface that has the address `local`, or whose subnet contains it; None if none has.

    The second is for addresses that are routed to a host without being configured one by one.
    """
    wanted = parse(local)
    family = socket.AF_INET if wanted.version == 4 else socket.AF_INET6
    closest: tuple[int, str] | None = None
    for label, entries in psutil.net_if_addrs().items():
        # Linux lists labelled addresses as interfaces of their own, such as "eth0:1".
        name = str(label).partition(":")[0]
        for entry in entries:
            if entry.family != family:
                continue
            address = entry.address.partition("%")[0]
            if parse(address) == wanted:
                return name
            if not entry.netmask:
                continue
            network = _network(address, entry.netmask)
            if wanted in network and (closest is None or network.prefixlen > closest[0]):
                closest = network.prefixlen, name
    return closest[1] if closest is not None else None


def _network(address: str, netmask: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    if ":" in netmask:
        prefix = bin(int(ipaddress.IPv6Address(netmask.partition("/")[0]))).count("1")
        return ipaddress.ip_network(f"{address}/{prefix}", strict=False)
    return ipaddress.ip_network(f"{address}/{netmask}", strict=False)


def endpoint(host: str, port: int) -> str:
    """Host and port as one writes them, IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
