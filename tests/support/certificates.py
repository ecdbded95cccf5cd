"""Certificates for servers on loopback, and of the authority that has signed them, which nobody knows."""

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


class Certificates(NamedTuple):
    """Files: the authority, and a server's certificate of it, with its key."""

    authority: Path
    server: Path
    key: Path


def made_in(folder: Path) -> Certificates:
    """Write them into a folder, for a server on 127.0.0.1."""
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    is_authority = x509.BasicConstraints(ca=True, path_length=None)
    authority = _named("authority", authority_key).add_extension(is_authority, critical=True)
    addresses = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    server = _named("server", key).add_extension(addresses, critical=False)
    made = Certificates(folder / "authority.pem", folder / "server.pem", folder / "key.pem")
    for builder, path in ((authority, made.authority), (server, made.server)):
        path.write_bytes(builder.sign(authority_key, SHA256()).public_bytes(Encoding.PEM))
    made.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return made


def _named(name: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    builder = x509.CertificateBuilder().serial_number(x509.random_serial_number())
    builder = builder.issuer_name(_called("authority")).subject_name(_called(name))
    return builder.public_key(key.public_key()).not_valid_before(now - day).not_valid_after(now + day)


def _called(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
