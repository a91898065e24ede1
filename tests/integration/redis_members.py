"""The servers that topologies of Redis are made of, and the rights that docs/redis.md names.

A server's configuration lies outside its data: what it has learnt (whom to follow, which slots are
whose) outlives a restart without data.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rdzv.conformance.servers.base import PASSWORD, USER
from rdzv.conformance.servers.programs import Program, Workplace
from rdzv.conformance.servers.technologies import Redis

from .certificates import certify

DOCS = Path(__file__).resolve().parents[2] / "docs" / "redis.md"
ADMIN = "admin"


def documented_rights() -> list[str]:
    """The ACL rule that docs/redis.md calls enough, from the user's name on."""
    mark = "<!-- test: least privilege -->\n```\n"
    _, _, rest = DOCS.read_text(encoding="utf-8").partition(mark)
    words = rest.partition("\n```")[0].split()
    assert words[:3] == ["ACL", "SETUSER", USER], f"no ACL rule in {DOCS}"
    return words[2:]


def password_in(rights: Sequence[str]) -> str:
    """The password that an ACL rule sets."""
    (password,) = (word[1:] for word in rights if word.startswith(">"))
    return password


class Member(Redis):
    """One server, with a configuration of its own that it may rewrite."""

    def __init__(self, *settings: str, options: Sequence[str] = ()) -> None:
        self._settings, self._options = settings, options

    def prepare(self, program: Program, place: Workplace) -> None:
        super().prepare(program, place)
        configuration = place.directory / "configuration"
        if not configuration.exists():
            text = "".join(f"{line}\n" for line in self.settings(place))
            configuration.write_text(text, encoding="utf-8")

    def settings(self, place: Workplace) -> Sequence[str]:
        """The lines of the configuration."""
        return self._settings

    def command(self, program: Program, place: Workplace, port: int, port_2: int) -> list[str]:
        _, *options = super().command(program, place, port, port_2)
        numbers = {"{port}": str(port), "{port_2}": str(port_2), "{folder}": str(place.directory)}
        for word in self._options:
            for name, value in numbers.items():
                word = word.replace(name, value)
            options.append(word)
        return [str(program.path), str(place.directory / "configuration"), *options]


class SentinelMember(Member):
    """A Sentinel: keeps no data, and refuses the options of a server that does."""

    def command(self, program: Program, place: Workplace, port: int, port_2: int) -> list[str]:
        where = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(place.data)]
        configuration = str(place.directory / "configuration")
        return [str(program.path), configuration, *where, "--sentinel"]


class SecureMember(Member):
    """TLS only, for clients with a certificate; the user ``default`` is off."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = Path()

    def prepare(self, program: Program, place: Workplace) -> None:
        self._folder = place.directory
        if not (place.directory / "ca.pem").exists():
            certify(place.run)
            rights = " ".join(documented_rights())
            # Off, but with its rights: Redis replays transactions as this user, and drops those
            # that it may not make (docs/redis.md).
            nobody = "user default off ~* &* +@all\n"
            admin = f"user {ADMIN} on >{PASSWORD} ~* &* +@all\n"
            users = f"{nobody}{admin}user {rights}\n"
            (place.directory / "users").write_text(users, encoding="utf-8")
        super().prepare(program, place)

    def settings(self, place: Workplace) -> Sequence[str]:
        folder = place.directory
        return [
            f"aclfile {folder}/users",
            f"tls-ca-cert-file {folder}/ca.pem",
            f"tls-cert-file {folder}/server.pem",
            f"tls-key-file {folder}/server.key",
            "tls-auth-clients yes",
        ]

    def command(self, program: Program, place: Workplace, port: int, port_2: int) -> list[str]:
        words = super().command(program, place, port, port_2)
        return [*words, "--port", "0", "--tls-port", str(port)]

    def endpoint(self, host: str, port: int) -> str:
        return self.url(USER, password_in(documented_rights()), host, port)

    def url(self, user: str, password: str, host: str, port: int) -> str:
        """For this user, with the client's certificate."""
        folder = self._folder
        files = f"ssl_certfile={folder}/client.pem&ssl_keyfile={folder}/client.key"
        return f"rediss://{user}:{password}@{host}:{port}?ssl_ca_certs={folder}/ca.pem&{files}"
