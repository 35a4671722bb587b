"""Forward TCP connections to etcd: `forwarder.py HOST FIRST_PORT TARGET...`. Without it, its node is cut off from etcd."""

from __future__ import annotations

import asyncio
import sys


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def _listen(host: str, port: int, target: str) -> asyncio.Server:
    there, _, its_port = target.rpartition(":")

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            reader_there, writer_there = await asyncio.open_connection(there, int(its_port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, writer_there), _pump(reader_there, writer))

    return await asyncio.start_server(forward, host, port)


async def _main(host: str, first_port: str, *targets: str) -> None:
    servers = [await _listen(host, int(first_port) + place, target) for place, target in enumerate(targets)]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
