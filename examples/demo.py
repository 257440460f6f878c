"""From publish to ack on an embedded store, with a kill and a takeover in between.

make demo
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from odq_encodings import encode_metadata_log_key, inspect_row
from opendata_queue import ClaimedMessage, FencedError, NewMessage, QueueOptions, System
from opendata_queue.store import Database, Objects, StoreSettings

console = Console(width=100)

DOOMED = """
import asyncio, os, signal, sys
from opendata_queue import System

async def main():
    system = await System.open(sys.argv[1])
    for number in range(3):
        message_id = await system.publish(b"survivor %d" % number, headers={"type": "survivor"})
        print(message_id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def say(number: int, title: str) -> None:
    console.print()
    console.rule(f"[bold cyan]{number}. {title}", align="left")


async def publish(url: str) -> int:
    say(1, "Open a folder and publish")
    async with await System.open(url) as system:
        console.print(f"root      {url}\ninstance  {system.descriptor.instance_id}")
        first = await system.publish(
            b'{"order": 17, "total": 99.99}',
            headers={"type": "order.created", "region": "emea"},
            retention_seconds=86_400,
        )
        console.print(f"published message [bold]{first}[/]; it was durable before this line")

        messages = [NewMessage(b"%d" % n, headers={"type": "tick"}) for n in range(10_000)]
        start = time.perf_counter()
        for cut in range(0, len(messages), 500):
            await system.publish_many(messages[cut : cut + 500])
        seconds = time.perf_counter() - start
        console.print(
            f"published [bold]10,000[/] more in {seconds:.2f} s, 500 at a time, each batch synced "
            f"to the disk: {10_000 / seconds:,.0f} messages/s"
        )

        large = await system.publish(b"x" * 10_000_000, headers={"type": "video"})
        stored = await system.read(large)
        assert stored is not None
        console.print(f"a payload of {len(stored.payload or b''):,} bytes came back from its blob")

        again = [await system.publish(b"pay", idempotency_key="invoice-4711") for _ in range(3)]
        console.print(f"published one idempotency key three times: ids {again}")
    return first


async def consume(url: str) -> None:
    say(2, "Queues are filters; consumers claim, acknowledge, fail and retry")
    async with await System.open(url) as system:
        dead_after_two = QueueOptions(max_attempts=2, backoff_ms=0)
        await system.create_queue("emails", filter="type = 'order.created'", options=dead_after_two)
        await system.create_queue("large", filter="price >= 99.99 PRIORITY 5; price > 10")
        for number, price in enumerate(["5", "12.50", "99.99", "250"]):
            await system.publish(
                b"order %d" % number, headers={"type": "order.created", "price": price}
            )
        await system.publish(b"order 4", headers={"type": "order.created"}, delay_ms=200)
        large = await system.claim("large", 10, wait_ms=1_000)
        console.print("queue large, by priority: " + ", ".join(_shown(m) for m in large))
        await system.ack("large", *(message.receipt for message in large))

        handled = 0
        while handled < 6:
            for message in await system.claim("emails", 10, wait_ms=1_000):
                handled += 1
                if message.payload == b"order 1":
                    await system.nack("emails", message.receipt, error="no such customer")
                    console.print(f"  [red]✗[/] {_shown(message)}: attempt {message.attempts}")
                else:
                    await system.ack("emails", message.receipt)
                    console.print(f"  [green]✓[/] {_shown(message)}")
        (dead,) = await system.failed("emails")
        console.print(
            f"  dead letter {dead.message_id}: {dead.error!r} after {dead.attempts} attempts"
        )
        await system.replay("emails", dead.message_id)
        (again,) = await system.claim("emails", wait_ms=1_000)
        await system.ack("emails", again.receipt)
        console.print(f"  [green]✓[/] replayed {_shown(again)}")
        stats = system.stats("emails")
        console.print(f"  queue emails: {stats.done} done, {stats.available} available")


def _shown(message: ClaimedMessage) -> str:
    return f"{(message.payload or b'').decode()} (priority {message.priority})"


async def survive_a_kill(url: str) -> None:
    say(3, "Kill a publisher in the middle (SIGKILL), and open the root again")
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DOOMED, url, stdout=subprocess.PIPE
    )
    said, _ = await child.communicate()
    acknowledged = [int(line) for line in said.split()]
    console.print(f"the process acknowledged {acknowledged} and ended with {child.returncode}")
    async with await System.open(url) as system:
        for message in await system.read_many(acknowledged):
            assert message is not None
            console.print(f"  [green]✓[/] {message.message_id}: {message.payload!r}")


async def fence(url: str) -> None:
    say(4, "Two owners: the second one takes over, the first one is told")
    first = await System.open(url)
    second = await System.open(url)
    try:
        await first.publish(b"too late")
    except FencedError as error:
        console.print(f"first owner:  [yellow]FencedError[/]: {error}")
    console.print(f"second owner: published {await second.publish(b'mine now')}")
    await first.close()
    await second.close()


async def show_bytes(url: str, message_id: int) -> None:
    say(5, "The bytes are an open format (RFC 0001): any tool can read them")
    objects = Objects.open(url, StoreSettings())
    database = await Database.open(objects, "messages/00000")
    key = encode_metadata_log_key(message_id)
    value = await database.get(key)
    await database.close()
    assert value is not None
    table = Table(title=f"metadata of message {message_id}", title_justify="left")
    for column in ("offset", "bytes", "field", "value"):
        table.add_column(column, overflow="fold", max_width=40)
    for field in inspect_row(key, value)[1].fields:
        table.add_row(str(field.offset), field.data.hex(" "), field.name, str(field.value))
    console.print(table)
    console.print(f"[dim]the same with: odq inspect hex {key.hex()[:16]}… {value.hex()[:16]}…")


async def main() -> None:
    console.print(
        Panel(
            "A message queue whose only durable state is an object store.", title="OpenData Queue"
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        url = (Path(folder) / "demo").as_uri()
        first = await publish(url)
        await consume(url)
        await survive_a_kill(url)
        await fence(url)
        await show_bytes(url, first)


if __name__ == "__main__":
    asyncio.run(main())
