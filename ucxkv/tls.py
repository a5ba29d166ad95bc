"""TLS for the control plane: whose certificates are trusted, and what went wrong in words."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ucxkv.errors import ParamInvalid

# What a TLS connection begins with; ours does not.
RECORD = b"\x16"

_CLUSTER = "{cluster_id}"


@dataclass(frozen=True)
class Tls:
    """Mutual TLS 1.3 for the control plane: both ends show a certificate.

    certificate: path of a PEM file with this engine's certificate, and those between it and the
        authority's, if there are any.  It has to be good for clients and for servers.
    key: path of a PEM file with its private key, not encrypted.
    ca: path of a PEM file with the authorities that vouch for peers: whoever has a certificate of
        theirs is a peer, so they should certify nobody else.
    peer_name: a DNS or URI name that the certificates of peers must carry in their subjectAltName,
        to the letter.  "{cluster_id}" in it stands for the number of the peer, so that none can
        pass for another: "kv-{cluster_id}.example".  None (the default): no name is looked at.

    Which host a peer is on is not looked at, since clusters move between hosts.  Files that have
    been replaced are read again when the next connection is made.  Revocation lists are not looked
    at: let certificates be short-lived.

    Raises TypeError for what is no path, ParamInvalid for an empty one.
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str]
    peer_name: str | None = None

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "ca"):
            value = getattr(self, name)
            if not isinstance(value, (str, os.PathLike)):
                raise TypeError(f"{name} must be a path, not {type(value).__name__}")
            if not os.fspath(value):
                raise ParamInvalid(f"{name} must be the path of a file")
        if self.peer_name is not None and not isinstance(self.peer_name, str):
            raise TypeError("peer_name must be a str or None")
        if self.peer_name == "":
            raise ParamInvalid("an empty peer_name names nobody: use None")

    def stranger(self, names: frozenset[str], cluster_id: int) -> str | None:
        """Why a certificate with these names is not that of the cluster; None if it may be."""
        if self.peer_name is None:
            return None
        wanted = self.peer_name.replace(_CLUSTER, str(cluster_id))
        if wanted in names:
            return None
        shown = ", ".join(sorted(names))[:200] or "no name at all"
        return f"the certificate of cluster {cluster_id} should name {wanted}, but has {shown}"


class Certificates:
    """The contexts of one engine, by the files that its `Tls` names."""

    def __init__(self, tls: Tls, warn: Callable[[str, str], None]) -> None:
        self.tls = tls
        self._warn = warn
        self._read: tuple[object, ...] = ()
        self._contexts: dict[bool, ssl.SSLContext] = {}

    def load(self) -> None:
        """Read the files; ParamInvalid if they are of no use."""
        read = self._state()
        contexts = {listening: self._context(listening) for listening in (True, False)}
        self._read, self._contexts = read, contexts

    def context(self, listening: bool) -> ssl.SSLContext:
        """For the next connection, as listener or as dialler."""
        try:
            if self._state() != self._read:
                self.load()
        except ParamInvalid as error:
            # They may be half replaced: those read before are used until they are whole.
            self._warn("certificates", f"the changed certificate is not used: {error}")
        return self._contexts[listening]

    def _state(self) -> tuple[object, ...]:
        states = []
        for path in (self.tls.certificate, self.tls.key, self.tls.ca):
            try:
                found = os.stat(path)
            except OSError as error:
                raise ParamInvalid(f"Tls: {os.fspath(path)}: {error.strerror}") from error
            states.append((found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size))
        return tuple(states)

    def _context(self, listening: bool) -> ssl.SSLContext:
        kind = ssl.PROTOCOL_TLS_SERVER if listening else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(kind)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # `Tls.peer_name` is looked at instead, and on both sides.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        if listening:
            # Nothing is resumed: each connection shows its certificate.
            context.num_tickets = 0
        tls = self.tls
        try:
            context.load_cert_chain(tls.certificate, tls.key, password=_no_password)
        except OSError as error:
            raise ParamInvalid(
                f"Tls: the certificate {os.fspath(tls.certificate)} with the key"
                f" {os.fspath(tls.key)}: {explain(error)}"
            ) from error
        try:
            context.load_verify_locations(cafile=tls.ca)
        except OSError as error:
            raise ParamInvalid(
                f"Tls: the authorities in {os.fspath(tls.ca)}: {explain(error)}"
            ) from error
        return context


def _no_password() -> str:
    # Without this OpenSSL would ask at the terminal, and wait.
    raise ParamInvalid("Tls: the key must not be encrypted")


def names_of(certificate: Any) -> frozenset[str]:
    """The DNS and URI names in what `SSLObject.getpeercert` returns."""
    names = (certificate or {}).get("subjectAltName", ())
    return frozenset(value for kind, value in names if kind in ("DNS", "URI"))


def explain(error: OSError) -> str:
    """What went wrong in TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is not accepted: {error.verify_message}"
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error) or type(error).__name__
    reason = error.reason or ""
    text = reason.lower().replace("_", " ") or str(error)
    if "ALERT" in reason:
        what = text.partition("alert ")[2]
        if "certificate" in what or what in ("unknown ca", "access denied", "decrypt error"):
            return f"the peer does not accept this side's certificate: {what}"
        return f"the peer ended the TLS handshake: {what}"
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
        return "the peer does not speak TLS"
    return text
