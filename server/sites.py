"""Names and pages: the Host and Origin of the requests that an HTTP port answers. Imports nothing of HTTP.

A page of any site can reach a server on its reader's machine: across sites, or by a name of its own that leads to the
server (DNS rebinding). It chooses everything in its requests but two headers, in which the browser names the page.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from memlm.errors import InvalidInput, PermissionDenied

NO_ORIGIN = "null"  # what a browser sends for a file, and for a frame that any page has made
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,*]*")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:\d{0,5})?", re.ASCII)


def check_site(text: str) -> str:
    """Returns the name of a host, or the origin of pages, as it is compared. Raises InvalidInput for other text."""
    site = text.lower() if text.endswith("://") else text.lower().removesuffix("/")
    if site == NO_ORIGIN:
        return site
    if _ORIGIN.fullmatch(site):
        return site.removesuffix(_DEFAULT_PORTS.get(site.partition("://")[0], "\n"))
    address = site.removeprefix("[").removesuffix("]")
    host = address if _is_address(address) else _host_of(site)
    if not host or host != address.removesuffix("."):  # as with a port
        raise InvalidInput(
            f"allowed_hosts is {text!r}; expected a name as chat.example.org, or an origin as http://localhost:3000",
            field="allowed_hosts",
        )
    return host


class Sites:
    """The names by which a server may be called, and the pages that may call it.

    `allowed` are texts of `check_site`, and `host` is the address that the server listens on. A server that `is_open`
    wants no tokens. One that does has nothing for a page, which has no token unless its reader gives it one.
    """

    def __init__(self, allowed: Sequence[str], host: str, *, is_open: bool) -> None:
        allowed = tuple(map(check_site, allowed))
        self._names = frozenset(each for each in allowed if "://" not in each and each != NO_ORIGIN)
        self._origins, self._is_open = frozenset(allowed) - self._names, is_open
        self._own_names = {"localhost", _host_of(host) or host} | self._names

    def check_host(self, hosts: Sequence[str], http_version: str = "1.1") -> None:
        """Raises InvalidInput unless there is one Host, and PermissionDenied for a name that is not the server's."""
        if not hosts and http_version == "1.0":  # of no browser
            return
        if len(hosts) != 1:
            raise InvalidInput(f"the request has {len(hosts)} Host headers; send one")
        host = _host_of(hosts[0])
        if host is None:
            raise InvalidInput(f"the Host is {hosts[0][:200]!r}; expected NAME or NAME:PORT")
        if self._is_open and not self._is_own(host):
            raise PermissionDenied(
                f"this server does not answer to the name {host[:200]!r}; call it by its address or as localhost, or"
                f" start it with --allowed-hosts {host[:200]}"
            )

    def admit_origin(self, origins: Sequence[str], host: str, *, is_preflight: bool) -> str | None:
        """The origin whose pages may read the answer, None for that of the server itself, or none.

        Raises PermissionDenied for an origin that may not call the server: before the call itself (`is_preflight`), or
        without tokens.
        """
        foreign = [each for each in (origin.lower() for origin in origins) if not _is_same(each, host.lower())]
        if not foreign:
            return None
        if all(map(self._is_listed, foreign)):
            return origins[0]
        if self._is_open or is_preflight:
            origin = next(each for each in foreign if not self._is_listed(each))[:200]
            raise PermissionDenied(
                f"the request comes from a page of another site, {origin!r}; ask from the server's own page, or start"
                f" the server with --allowed-hosts {origin}"
            )
        return None

    def _is_own(self, host: str) -> bool:
        return host in self._own_names or host.endswith(".localhost") or _is_address(host)

    def _is_listed(self, origin: str) -> bool:
        scheme, _, authority = origin.partition("://")
        return origin in self._origins or (scheme in _DEFAULT_PORTS and _host_of(authority) in self._names)


def _is_same(origin: str, host: str) -> bool:
    scheme, _, authority = origin.partition("://")
    return scheme in _DEFAULT_PORTS and authority == host.removesuffix(_DEFAULT_PORTS[scheme])


def _host_of(authority: str) -> str | None:
    """The host in HOST or HOST:PORT as it is compared: in lower case, without brackets and the dot of the root."""
    found = _AUTHORITY.fullmatch(authority)
    return found[1].lower().removesuffix(".").strip("[]") if found else None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
