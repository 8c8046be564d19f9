"""Which host names a request may use for the server.

With DNS rebinding, another site makes its own name resolve to 127.0.0.1, so that its page can talk to a server on this
machine as if it were same-origin. The browser still sends that name in the Host header, which is checked here.
"""

from __future__ import annotations

from collections.abc import Sequence

from depthdecay.argument_checks import is_loopback
from depthdecay.errors import ArgumentError

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def allowed_hosts(bound_to: str, given: Sequence[str]) -> frozenset[str] | None:
    """Names without ports. None allows any: on a network, only the operator knows the server's names."""
    named = frozenset(map(_given_name, given))
    if "*" in named:
        return None
    if is_loopback(bound_to):
        return named | {*_LOOPBACK_NAMES, bound_to.lower()}
    return named or None


def _given_name(given: str) -> str:
    name = host_name(given)
    if not name or "/" in given:
        raise ArgumentError(
            f"allowed_host is '{given}'; expected a host name, such as models.example.org", "allowed_host"
        )
    return name


def host_name(header: str) -> str:
    """The name in a Host header, without port and brackets, in lower case."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    name = header if header.count(":") > 1 else header.partition(":")[0]  # an IPv6 address as operators write it
    return name.removesuffix(".")
