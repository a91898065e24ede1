"""Certificates for servers that are reached by TLS."""

from __future__ import annotations

from collections.abc import Callable


def certify(run: Callable[..., object], client: str = "rdzv") -> None:
    """Make an authority, ``ca``, and what it says of a ``server`` on this machine and of a
    ``client`` of that name: each a ``.pem`` and a ``.key`` in the folder in which ``run`` executes
    commands."""
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for name, subject in (("ca", "rdzv-ca"), ("server", "127.0.0.1"), ("client", client)):
        words = ["openssl", "req", "-x509", *kind, "-days", "2", "-subj", f"/CN={subject}"]
        words += ["-keyout", f"{name}.key", "-out", f"{name}.pem"]
        if name != "ca":
            words += ["-CA", "ca.pem", "-CAkey", "ca.key"]
            words += ["-addext", "basicConstraints=critical,CA:FALSE"]
        if name == "server":
            words += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
        run(*words)
