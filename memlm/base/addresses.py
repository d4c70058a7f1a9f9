"""Addresses of gRPC: which are of this machine, and the proxy by which others are reached."""

from __future__ import annotations

import ipaddress
import os
import re
from urllib.parse import urlsplit

PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")  # in gRPC's order, which reads them in lower case only
NO_PROXY_VARIABLES = ("no_grpc_proxy", "no_proxy")
NO_PROXY_OPTIONS = (("grpc.enable_http_proxy", 0),)


def host_in(target: str) -> str:
    """The host of a target: HOST:PORT, with or without gRPC's scheme before it."""
    address = re.sub(r"\A(dns:(//[^/]*/)?|ipv[46]:)", "", target)
    found = re.fullmatch(r"\[([^\]]*)\](:\d+)?|([^:]*)(:\d+)?", address)
    return (found[1] or found[3] or "").lower().removesuffix(".") if found else address


def is_local(target: str) -> bool:
    """Whether a target is a socket of this machine, which no proxy reaches."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    host = host_in(target)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def channel_options_of(target: str) -> tuple[tuple[str, int], ...]:
    """The options of a channel by which a target is reached: past proxies if it is local."""
    return NO_PROXY_OPTIONS if is_local(target) else ()


def proxy_advice(target: str) -> str:
    """What an error says of the proxy by which a target is asked for, "" without one."""
    name = next((name for name in PROXY_VARIABLES if os.environ.get(name)), None)
    if name is None or is_local(target) or _is_excepted(host_in(target)):
        return ""
    try:
        proxy = urlsplit(os.environ[name])
        shown = f"{proxy.hostname}:{proxy.port}" if proxy.hostname and proxy.port else proxy.hostname or "one"
    except ValueError:  # of a port that is no number
        shown = "one"
    return (
        f"; it was asked for through the proxy {shown} of the variable {name}, which no_proxy={host_in(target)} avoids"
    )


def _is_excepted(host: str) -> bool:
    excepted = next((os.environ[name] for name in NO_PROXY_VARIABLES if os.environ.get(name)), "")
    return any(host.endswith(each.strip()) for each in excepted.split(",") if each.strip())
