"""Certificate authorities that live for one test."""

from __future__ import annotations

import datetime
import itertools
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class Authority:
    """Issues certificates into files of `folder`; `files` are arguments of ucxkv.Tls."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._subject = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._numbers = itertools.count(1)
        self._valid = datetime.datetime.now(datetime.timezone.utc)
        builder = self._builder(self._subject, self._key.public_key(), -DAY, DAY)
        builder = builder.add_extension(x509.BasicConstraints(True, None), critical=True)
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(self._sign(builder))

    def _builder(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        since: datetime.timedelta,
        until: datetime.timedelta,
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._valid + since)
            .not_valid_after(self._valid + until)
        )

    def _sign(self, builder: x509.CertificateBuilder) -> bytes:
        certificate = builder.sign(self._key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM)

    def files(
        self,
        *names: str,
        since: datetime.timedelta = -DAY,
        until: datetime.timedelta = DAY,
        password: bytes | None = None,
        ca: Path | None = None,
        peer_name: str | None = None,
    ) -> dict[str, str | None]:
        """A new certificate that carries these DNS names; peers are to have one of `ca`."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(_name("member"), key.public_key(), since, until)
        if names:
            alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
            builder = builder.add_extension(alternatives, critical=False)
        stem = self._folder / f"{self.ca.stem}-{next(self._numbers)}"
        certificate, secret = stem.with_suffix(".crt"), stem.with_suffix(".key")
        certificate.write_bytes(self._sign(builder))
        secret.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(password)
                if password
                else serialization.NoEncryption(),
            )
        )
        return {
            "certificate": str(certificate),
            "key": str(secret),
            "ca": str(ca or self.ca),
            "peer_name": peer_name,
        }
