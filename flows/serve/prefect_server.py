"""Prefect's server as ``make up`` starts it: one that no foreign web page reaches through a browser of this machine.

Whoever may ask Prefect's API runs commands, and it takes any ``Host`` and, by default, any ``Origin``. A request here needs:

- a host that is an IP address, ``localhost``, the name that the server listens on, or that of an origin in
  ``PREFECT_SERVER_CORS_ALLOWED_ORIGINS``. Any other may be a foreign site's that resolves to this machine (DNS rebinding);
- where it has an origin, as browsers give all that could change something: the host's own, or one of that variable.

CORS alone would stop neither the first nor a POST without a content type, which needs no preflight and which Prefect takes
for JSON. Websockets are held to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

import uvicorn
from prefect.server.api.server import create_app
from prefect.settings import (
    PREFECT_SERVER_CORS_ALLOWED_ORIGINS,
    PREFECT_UI_API_URL,
    get_current_settings,
    temporary_settings,
)
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

ORIGINS = PREFECT_SERVER_CORS_ALLOWED_ORIGINS.name


class Guard:
    """An ASGI application that refuses foreign hosts and origins with status 403, and gives all else to another.

    Args:
        app: The other.
        host: The name that the server listens on.
        origins: Origins that are let in beside the server's own, e.g. ``https://lab.example``; ``*`` lets in everybody.
    """

    def __init__(self, app: ASGIApp, host: str, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._names = {"localhost", host, *map(_name, (urlsplit(origin).netloc for origin in origins))}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = "" if scope["type"] == "lifespan" else self.refusal(Headers(scope=scope))
        if not reason:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocketClose(reason=reason)(scope, receive, send)
        else:
            await PlainTextResponse(reason, status_code=403)(scope, receive, send)

    def refusal(self, headers: Headers) -> str:
        """Return why a request is refused, nothing for one that is let in."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if "*" in self._origins:
            return ""
        if _name(host) not in self._names and not _is_address(_name(host)):
            return f"host {host!r:.80} is none of this server's; to let it in, name its origin in {ORIGINS}"
        if origin is None or origin in self._origins or origin in {f"http://{host}", f"https://{host}"}:
            return ""
        return f"origin {origin!r:.80} is none of this server's; to let it in, name it in {ORIGINS}"


def _name(netloc: str) -> str:
    """Return the host of ``host:port``, in lower case; nothing for what is none."""
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def main() -> None:
    """Serve where Prefect's settings say. Its pages ask the server that they came from, whatever name that was reached by."""
    api = get_current_settings().server.api
    own = {PREFECT_SERVER_CORS_ALLOWED_ORIGINS: f"http://{api.host}:{api.port}", PREFECT_UI_API_URL: api.base_path or "/api"}
    with temporary_settings(set_defaults=own):
        uvicorn.run(
            Guard(create_app(final=True), api.host, PREFECT_SERVER_CORS_ALLOWED_ORIGINS.value().split(",")),
            host=api.host,
            port=api.port,
            timeout_keep_alive=api.keepalive_timeout,
            ws_ping_interval=api.websocket_ping_interval,
            ws_ping_timeout=api.websocket_ping_timeout,
            log_level=get_current_settings().server.logging_level.lower(),
        )


if __name__ == "__main__":
    main()
