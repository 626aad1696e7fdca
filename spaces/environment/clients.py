"""Who asks: the address of a client, and pages of other sites."""

import ipaddress

from fastapi import WebSocketException
from starlette.requests import HTTPConnection

from sessions import Refusal


def client_of(connection: HTTPConnection, proxies: int) -> str:
    """Return the client's address, or its /64 network for IPv6.

    Args:
        connection: A request, or a WebSocket.
        proxies: Number of trusted proxies; earlier entries of the header are untrusted.
    """
    peer = connection.client.host if connection.client else ""
    if proxies:
        said = ",".join(connection.headers.getlist("x-forwarded-for")).split(",")
        peer = said[-proxies].strip() if len(said) >= proxies else peer
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return "nobody"  # all of them are one: else each could have a limit of its own
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    prefix = 64 if address.version == 6 else 32
    return str(ipaddress.ip_network((address, prefix), strict=False))


async def no_page_of_others(connection: HTTPConnection) -> None:
    """Refuse requests of other sites' pages, which any site can send through a user's browser.

    Raises:
        Refusal: 403, for a request.
        WebSocketException: For a WebSocket, which is not accepted then.
    """
    origin = connection.headers.get("origin")
    if origin is None or origin.partition("://")[2] == connection.headers.get("host"):
        return
    if connection.scope["type"] == "websocket":
        raise WebSocketException(1008)
    raise Refusal(403, "a page of another site asks", "ask from a program, or a page of ours")
