"""A private CA, a server in front of another one that speaks TLS, and a proxy."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

import trustme


@dataclass(frozen=True)
class PrivateCa:
    """A CA that nobody trusts by default, and what it has signed."""

    folder: Path
    authority: trustme.CA = field(default_factory=trustme.CA)

    @property
    def file(self) -> Path:
        path = self.folder / "ca.pem"
        self.authority.cert_pem.write_to_path(path)
        return path

    @property
    def client(self) -> Path:
        path = self.folder / "client.pem"
        self.authority.issue_cert(
            "client@example.org"
        ).private_key_and_cert_chain_pem.write_to_path(path)
        return path

    def server_context(self, *, asks_clients: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
        if asks_clients:
            self.authority.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextmanager
def listening(handle: Handler, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """A server on a free port of the loopback interface; the port."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(handle, "127.0.0.1", 0, ssl=context))
    loop.set_exception_handler(lambda *_: None)  # clients that hang up are expected
    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except (OSError, ssl.SSLError):
        pass
    finally:
        writer.close()


async def _join(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int, first: bytes = b""
) -> None:
    there, back = await asyncio.open_connection("127.0.0.1", port)
    back.write(first)
    await asyncio.gather(_pump(reader, back), _pump(there, writer))


@contextmanager
def tls_front(port: int, context: ssl.SSLContext) -> Iterator[str]:
    """A server that speaks TLS and passes everything on to a port; its address."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _join(reader, writer, port)

    with listening(handle, context) as bound:
        yield f"https://127.0.0.1:{bound}"


@contextmanager
def http_proxy(port: int, seen: list[str]) -> Iterator[str]:
    """A proxy that passes every request on to one port, whatever host it names; its address.

    ``seen`` gets the first line of each connection.
    """

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        seen.append(line.decode().strip())
        if line.startswith(b"CONNECT"):
            while (await reader.readline()).strip():
                pass
            writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
            line = b""
        elif b"://" in line:  # servers want the path alone
            method, url, version = line.split()
            line = b" ".join((method, b"/" + url.split(b"/", 3)[3], version)) + b"\r\n"
        await _join(reader, writer, port, line)

    with listening(handle) as bound:
        yield f"http://127.0.0.1:{bound}"
