"""Whose name a request may call the server by.

A page of another site can make a browser look its own name up as 127.0.0.1 and then talk to a server on this machine
as if it were its own (DNS rebinding). The browser still sends that name in the Host header, which is how it is told.
"""

from __future__ import annotations

from collections.abc import Sequence

from depthdecay.argument_checks import is_loopback
from depthdecay.errors import ArgumentError

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def allowed_hosts(bound_to: str, given: Sequence[str]) -> frozenset[str] | None:
    """Names without ports; None where any will do: on a network only the operator knows what a server is called."""
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
            f"allowed_host is '{given}'; expected a host's name, such as models.example.org", "allowed_host"
        )
    return name


def host_name(header: str) -> str:
    """The name in a Host header, without port and brackets, in lower case."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    name = header if header.count(":") > 1 else header.partition(":")[0]  # an IPv6 address as operators write it
    return name.removesuffix(".")
