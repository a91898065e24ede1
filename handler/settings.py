"""What a user chose: torch's ``RendezvousParameters`` made into one frozen :class:`Settings`.

Rules:

* Every option and every limit is checked here, once, before anything is opened. What cannot work
  raises ``RendezvousSettingsError``, whose text names the option, its value and what would work.
* Names and defaults are torch's where torch has them. Values come as text from ``--rdzv-conf`` or
  as numbers and truth values from Python; fractions of a second are allowed. None means unset.
* Zero is refused for every duration, as torch does, and for one reason more: a zero that reaches
  a server as an expiry means "never" on one and "at once" on the next.
* torchrun logs endpoint and options, so a secret is in neither: ``env:NAME`` as endpoint and
  ``password_file=`` fetch it, and nothing here shows it.
"""

from __future__ import annotations

import difflib
import errno
import logging
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from rdzv.errors import RendezvousSettingsError, mask_secrets, secrets_in
from rdzv.state import NODES_MAX, TEXT_CHARACTERS_MAX

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

logger = logging.getLogger(__name__)

DURATION_SECONDS_MIN = 0.001
"""What the coarsest clock among the backends can tell from zero."""
DURATION_SECONDS_MAX = 1_728_000.0
"""20 days: poll(2), and much that is built on it, counts milliseconds in 31 bits."""
KEEP_ALIVE_ATTEMPTS_MAX = 1000
RUN_ID_BYTES_MAX = 255
ENDPOINT_CHARACTERS_MAX = 4096
PASSWORD_BYTES_MAX = 4096
LOCAL_ADDR_CHARACTERS_MAX = 255
KEY_PREFIX_CHARACTERS_MAX = 128
TABLE_PREFIX_CHARACTERS_MAX = 32
SCHEMA_CHARACTERS_MAX = 63
SHOWN_CHARACTERS_MAX = 80

RANK_ORDERS = ("stable", "natural", "topology")
STORE_TYPES = ("tcp", "file")
_STORE_TYPE_OF_BACKEND = {"tcpstore": "tcp", "filestore": "file"}

_DURATIONS_SECONDS = {
    "join_timeout": 600.0,
    "last_call_timeout": 30.0,
    "close_timeout": 30.0,
    "heartbeat_timeout": 5.0,
    "keep_alive_interval": 5.0,
    "read_timeout": 60.0,
    "outage_timeout": 600.0,
    "closed_grace": 60.0,
}
OPTIONS = frozenset(_DURATIONS_SECONDS) | {
    *("keep_alive_max_attempt", "restart_on_node_loss", "rank_order", "rank_hint", "topology"),
    *("is_host", "store_type", "password_file", "key_prefix", "table_prefix", "schema"),
    *("create_tables", "allow_network_filesystem"),
}
"""The names that ``--rdzv-conf`` knows, whatever the backend."""
TORCHRUN_DEFAULT_RUN_ID = "none"
_NOT_THE_USERS = frozenset({"timeout"})
"""torchrun always adds ``timeout=900``: nobody's choice, used by nothing of ours."""

# Registry, factory and handler read the same parameters object, and the handler does not know the
# backend's own options: so what was said of them is remembered, and nothing is warned of twice.
_extra_options: WeakKeyDictionary[RendezvousParameters, set[str]] = WeakKeyDictionary()
_warnings: WeakKeyDictionary[RendezvousParameters, set[str]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Settings:
    """All that the rest of rdzv asks of the user's choices; made by :meth:`from_parameters`.

    Its repr shows no secret. Made directly, by tests for instance, it checks nothing.
    """

    backend: str
    """The name given to ``--rdzv-backend``, which ``get_backend()`` has to answer."""
    endpoint: str
    """After resolution of ``env:NAME``. May hold a password: show :attr:`masked_endpoint`."""
    run_id: str
    min_nodes: int
    max_nodes: int
    local_addr: str | None = None

    join_timeout_seconds: float = _DURATIONS_SECONDS["join_timeout"]
    last_call_timeout_seconds: float = _DURATIONS_SECONDS["last_call_timeout"]
    close_timeout_seconds: float = _DURATIONS_SECONDS["close_timeout"]
    heartbeat_timeout_seconds: float = _DURATIONS_SECONDS["heartbeat_timeout"]
    keep_alive_interval_seconds: float = _DURATIONS_SECONDS["keep_alive_interval"]
    keep_alive_max_attempt: int = 3
    read_timeout_seconds: float = _DURATIONS_SECONDS["read_timeout"]
    outage_timeout_seconds: float = _DURATIONS_SECONDS["outage_timeout"]
    """How long running workers outlive a backend that does not answer."""
    closed_grace_seconds: float = _DURATIONS_SECONDS["closed_grace"]
    """How long a closed run turns newcomers away before its id can be used again."""
    """How long after a change is published all agents show it, together."""

    restart_on_node_loss: bool = True
    """Whether survivors re-join as soon as a participant is lost."""
    rank_order: str = "stable"
    rank_hint: int | None = None
    topology: str = ""
    """This node's label for ``rank_order=topology``, for instance its rack."""

    is_host: bool | None = None
    """``tcpstore``: whether this node hosts the store; None finds out by trying."""
    store_type: str | None = None
    """Torch's ``tcp`` or ``file``; set for the backends ``tcpstore`` and ``filestore``."""
    password: str | None = field(default=None, repr=False)
    """What ``password_file`` holds."""
    key_prefix: str = "rdzv"
    table_prefix: str = "rdzv_"
    schema: str | None = None
    create_tables: bool = True
    allow_network_filesystem: bool = False

    @classmethod
    def from_parameters(
        cls, params: RendezvousParameters, extra_options: frozenset[str] = frozenset()
    ) -> Settings:
        """Check ``params`` and read the environment and files that they name.

        ``extra_options`` are names that a backend reads from ``params`` itself. Of other unknown
        names a warning is logged, once for one ``params``.

        Raises ``RendezvousSettingsError`` (also a ``ValueError``) for what cannot work.
        """
        options = params.config
        _warn_of_unknown(params, extra_options)
        min_nodes, max_nodes = _nodes(params.min_nodes, params.max_nodes)
        settings = cls(
            backend=params.backend,
            endpoint=resolve_endpoint(params.endpoint),
            run_id=_run_id(params.run_id),
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            local_addr=_local_addr(params.local_addr),
            keep_alive_max_attempt=_whole(
                options, "keep_alive_max_attempt", 1, KEEP_ALIVE_ATTEMPTS_MAX, 3
            ),
            restart_on_node_loss=_truth(options, "restart_on_node_loss", True),
            rank_order=_choice(options, "rank_order", RANK_ORDERS) or "stable",
            rank_hint=_whole(options, "rank_hint", 0, NODES_MAX - 1, None),
            topology=_topology(options),
            is_host=_truth(options, "is_host", None),
            store_type=_store_type(params.backend, options),
            password=_password(options),
            key_prefix=_matching(
                options,
                "key_prefix",
                rf"[^\s{{}}]{{1,{KEY_PREFIX_CHARACTERS_MAX}}}",
                f"up to {KEY_PREFIX_CHARACTERS_MAX} characters without blanks and braces",
            )
            or "rdzv",
            table_prefix=_identifier(options, "table_prefix", TABLE_PREFIX_CHARACTERS_MAX)
            or "rdzv_",
            schema=_identifier(options, "schema", SCHEMA_CHARACTERS_MAX),
            create_tables=_truth(options, "create_tables", True),
            allow_network_filesystem=_truth(options, "allow_network_filesystem", False),
            **_durations(options),
        )
        settings._check_together()
        for doubt in _doubts(settings):
            _warn_once(params, doubt)
        return settings

    @property
    def liveness_window_seconds(self) -> float:
        """How long a node may be silent before its peers take it for dead."""
        return self.keep_alive_interval_seconds * self.keep_alive_max_attempt

    @property
    def masked_endpoint(self) -> str:
        """The endpoint for messages."""
        return mask_secrets(self.endpoint)

    def mask(self, text: str) -> str:
        """A text, such as a driver's message, without the secrets of these settings."""
        return mask_secrets(text, self.password, *secrets_in(self.endpoint))

    def __repr__(self) -> str:
        shown = {item.name: getattr(self, item.name) for item in fields(self) if item.repr}
        shown["endpoint"] = self.masked_endpoint
        inside = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"{type(self).__name__}({inside})"

    def _check_together(self) -> None:
        window, outage = self.liveness_window_seconds, self.outage_timeout_seconds
        if window >= outage:
            raise RendezvousSettingsError(
                f"keep_alive_interval={self.keep_alive_interval_seconds:g} times "
                f"keep_alive_max_attempt={self.keep_alive_max_attempt} makes a liveness window of "
                f"{window:g} s, which must be shorter than outage_timeout={outage:g}: workers would"
                " be given up before a lost node is noticed. Give a shorter keep_alive_interval, "
                f"or an outage_timeout of several times {window:g}."
            )


def resolve_endpoint(endpoint: str | None) -> str:
    """The endpoint, stripped; for ``env:NAME``, what the environment variable holds.

    Raises ``RendezvousSettingsError`` for a variable that is unset or blank.
    """
    text = (endpoint or "").strip()
    where = "the endpoint (--rdzv-endpoint)"
    if text.startswith("env:"):
        name = text.removeprefix("env:").strip()
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise _refusal(
                "--rdzv-endpoint", text, "give env:NAME, where NAME is an environment variable"
            )
        text = os.environ.get(name, "").strip()
        where = f"the environment variable {name}, which --rdzv-endpoint=env:{name} names,"
        if not text:
            raise RendezvousSettingsError(
                f"--rdzv-endpoint=env:{name} asks for the environment variable {name}, which is "
                f"{'blank' if name in os.environ else 'not set'}. Export the endpoint as {name} on"
                " every node."
            )
    if len(text) > ENDPOINT_CHARACTERS_MAX or "\0" in text:
        raise RendezvousSettingsError(
            f"The value of {where} is over {ENDPOINT_CHARACTERS_MAX} characters long or holds a "
            "NUL character. Give a URL, host:port or path."
        )
    return text


def _refusal(name: str, value: Any, remedy: str) -> RendezvousSettingsError:
    # Masked before it is cut: a secret without its end would no longer be recognised.
    shown = mask_secrets(value if isinstance(value, str) else repr(value))
    if len(shown) > SHOWN_CHARACTERS_MAX:
        shown = f"{shown[:SHOWN_CHARACTERS_MAX]}..."
    return RendezvousSettingsError(f"{name}={shown!r} cannot work: {remedy}.")


def _nodes(min_nodes: Any, max_nodes: Any) -> tuple[int, int]:
    for name, value in (("min_nodes", min_nodes), ("max_nodes", max_nodes)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= NODES_MAX:
            raise _refusal(
                name, value, f"give a whole number from 1 to {NODES_MAX} (--nnodes=MIN:MAX)"
            )
    if min_nodes > max_nodes:
        raise _refusal(
            "min_nodes",
            min_nodes,
            f"it must not be over max_nodes={max_nodes} (--nnodes=MIN:MAX)",
        )
    return min_nodes, max_nodes


def _run_id(run_id: Any) -> str:
    remedy = "give the same text, not blank, on all nodes of the job (--rdzv-id)"
    if not isinstance(run_id, str) or not run_id.strip() or "\0" in run_id:
        raise _refusal("run_id", run_id, remedy)
    try:
        length_bytes = len(run_id.encode())
    except UnicodeEncodeError as error:
        raise _refusal("run_id", ascii(run_id), "give valid UTF-8 (--rdzv-id)") from error
    if length_bytes > RUN_ID_BYTES_MAX:
        raise _refusal(
            "run_id",
            run_id,
            f"it has {length_bytes} bytes; give at most {RUN_ID_BYTES_MAX} (--rdzv-id)",
        )
    return run_id


def _local_addr(local_addr: Any) -> str | None:
    if local_addr is None or (isinstance(local_addr, str) and not local_addr.strip()):
        return None
    if not isinstance(local_addr, str) or len(local_addr) > LOCAL_ADDR_CHARACTERS_MAX:
        raise _refusal("--local-addr", local_addr, "give an address or name of this machine")
    return local_addr.strip()


def _durations(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{name}_seconds": _seconds(options, name, default)
        for name, default in _DURATIONS_SECONDS.items()
    }


def _seconds(options: Mapping[str, Any], name: str, default: float) -> float:
    value = options.get(name)
    if value is None:
        return default
    seconds = _number(value)
    if seconds is None:
        remedy = f"give a number of seconds without a unit, such as {default:g} or 0.5"
        raise _refusal(name, value, remedy)
    if not DURATION_SECONDS_MIN <= seconds <= DURATION_SECONDS_MAX:
        remedy = (
            f"give from {DURATION_SECONDS_MIN:g} to {DURATION_SECONDS_MAX:.0f} seconds "
            f"(the default is {default:g})"
        )
        raise _refusal(name, value, remedy)
    return seconds


def _whole(options: Mapping[str, Any], name: str, low: int, high: int, default: Any) -> Any:
    value = options.get(name)
    if value is None:
        return default
    number = _number(value)
    if number is None or not number.is_integer() or not low <= number <= high:
        raise _refusal(name, value, f"give a whole number from {low} to {high}")
    return int(number)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | Real):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _truth(options: Mapping[str, Any], name: str, default: Any) -> Any:
    value = options.get(name)
    if value is None:
        return default
    text = str(value).strip().lower() if isinstance(value, str | int) else ""
    if text in ("1", "true", "t", "yes", "y", "on"):
        return True
    if text in ("0", "false", "f", "no", "n", "off"):
        return False
    raise _refusal(name, value, "give true or false")


def _choice(options: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> str | None:
    value = options.get(name)
    if value is None:
        return None
    text = value.strip().lower() if isinstance(value, str) else ""
    if text not in choices:
        raise _refusal(name, value, f"give {' or '.join(choices)}")
    return text


def _store_type(backend: str, options: Mapping[str, Any]) -> str | None:
    given = _choice(options, "store_type", STORE_TYPES)
    own = _STORE_TYPE_OF_BACKEND.get(backend)
    if given and own and given != own:
        other = next(name for name, kind in _STORE_TYPE_OF_BACKEND.items() if kind == given)
        raise _refusal(
            "store_type", given, f"{backend} is {own}; leave it out, or use --rdzv-backend={other}"
        )
    return own or given


def _matching(options: Mapping[str, Any], name: str, pattern: str, allowed: str) -> str | None:
    value = options.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise _refusal(name, value, f"give {allowed}")
    return value


def _identifier(options: Mapping[str, Any], name: str, characters_max: int) -> str | None:
    return _matching(
        options,
        name,
        rf"[A-Za-z_][A-Za-z0-9_]{{0,{characters_max - 1}}}",
        f"up to {characters_max} letters, digits and underscores, not beginning with a digit",
    )


def _topology(options: Mapping[str, Any]) -> str:
    value = options.get("topology")
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > TEXT_CHARACTERS_MAX:
        raise _refusal("topology", value, f"give a label of up to {TEXT_CHARACTERS_MAX} characters")
    return value.strip()


def _password(options: Mapping[str, Any]) -> str | None:
    name = options.get("password_file")
    if name is None:
        return None
    try:
        written = _read_file(Path(name).expanduser())
        password = written.decode().rstrip("\r\n")
    except (OSError, TypeError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        remedy = f"no password can be read from it ({reason}); give a readable text file"
        # Without the cause: a decoding error quotes what it could not decode.
        raise _refusal("password_file", name, remedy) from None
    if not password or len(written) > PASSWORD_BYTES_MAX:
        remedy = f"the file must hold a password of 1 to {PASSWORD_BYTES_MAX} bytes and no more"
        raise _refusal("password_file", name, remedy)
    return password


def _read_file(path: Path) -> bytes:
    # Looked at first: to open a pipe that nobody writes to would block for ever.
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "no regular file")
    with path.open("rb") as file:
        return file.read(PASSWORD_BYTES_MAX + 1)


def _warn_of_unknown(params: RendezvousParameters, extra_options: frozenset[str]) -> None:
    known = OPTIONS | _NOT_THE_USERS | extra_options
    own = _extra_options.setdefault(params, set())
    own |= extra_options
    for name in sorted(set(params.config) - known - own):
        near = difflib.get_close_matches(name, OPTIONS | own, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        if re.search(r"pass(word|wd)?$|secret|token", name.lower()):
            hint = " torchrun logs all options: give a password with password_file=PATH."
        _warn_once(params, f"Unknown option {name} in --rdzv-conf is ignored.{hint}")


def _warn_once(params: RendezvousParameters, sentence: str) -> None:
    said = _warnings.setdefault(params, set())
    if sentence not in said:
        said.add(sentence)
        logger.warning("%s", sentence)


def _doubts(settings: Settings) -> Iterator[str]:
    last_call, join = settings.last_call_timeout_seconds, settings.join_timeout_seconds
    if settings.min_nodes < settings.max_nodes and last_call >= join:
        yield (
            f"last_call_timeout={last_call:g} is not shorter than join_timeout={join:g}: fewer "
            f"than {settings.max_nodes} nodes will time out before their last call is over. Give a "
            "shorter last_call_timeout."
        )
    interval = settings.keep_alive_interval_seconds
    if settings.min_nodes < settings.max_nodes and last_call < interval:
        yield (
            f"last_call_timeout={last_call:g} is shorter than keep_alive_interval={interval:g}: if "
            "the backend loses its data, nodes that join just then can form a world of their own "
            "before the running ones put the state back. Give a longer last_call_timeout."
        )
    if settings.min_nodes < settings.max_nodes and join <= 2 * interval + 1:
        yield (
            f"join_timeout={join:g} is too short for a node that joins a running job: the others "
            f"let it in after up to {2 * interval + 1:g} s. Give a longer join_timeout."
        )
    if settings.run_id == TORCHRUN_DEFAULT_RUN_ID:
        yield (
            "No --rdzv-id was given: every job on this endpoint without one is the same run. Give "
            "each job an id of its own."
        )
    if settings.keep_alive_max_attempt == 1:
        yield (
            "keep_alive_max_attempt=1: a node whose keep-alive is late once is taken for dead. "
            "Give 2 or more; with a shorter keep_alive_interval the window stays the same."
        )
    if settings.rank_order == "topology" and not settings.topology:
        yield (
            "rank_order=topology, but this node has no label: give topology=LABEL, for instance "
            "its rack, on every node."
        )
