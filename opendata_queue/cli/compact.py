"""``odq compact``: remove what is past its time from a root without an owner."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, Final

import typer

from odq_compactor import (
    CompactorOptions,
    RetentionReport,
    compact_root,
    free_space_beside,
    plan_root,
)
from opendata_queue.cli.common import (
    AsJson,
    RootStore,
    StoreArgument,
    check_root,
    complain,
    duration_ms,
    duration_text,
    is_remote,
    print_fields,
    print_json,
    print_table,
    run,
    time_text,
    url_of,
)
from opendata_queue.model.errors import (
    InvalidInputError,
    OdqError,
    OwnedError,
    StoreUnavailableError,
)

Once = Callable[[], Awaitable[RetentionReport]]
Show = Callable[[RetentionReport], None]

_BYTES: Final = ("bytes", "kB", "MB", "GB", "TB")
_NOTHING: Final = "nothing is past its time"
_NO_ROWS: Final = "no rows were removed; files that were replaced leave the store in 15 minutes"
_OWNER_DOES_IT: Final = (
    "it removes what is past its time by itself; odq compact --space-only can run meanwhile"
)


def compact(
    url: StoreArgument = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed, and touch nothing.")
    ] = False,
    every: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Go on for ever, with such a pause, like 10m or 1h."),
    ] = None,
    erase: Annotated[
        bool,
        typer.Option(
            "--erase",
            help="Delete expired messages at their deadline, and not an hour later; those of bulk "
            "jobs go with the last one of their shard.",
        ),
    ] = False,
    rewrite: Annotated[
        bool,
        typer.Option(
            "--rewrite",
            help="Have all files rewritten, and not only where a third or more can be freed.",
        ),
    ] = False,
    delete_when_done: Annotated[
        bool | None,
        typer.Option(
            "--delete-when-done/--keep-when-done",
            help="Have the system delete messages that all queues are done with, or keep them, "
            "from now on.",
            show_default=False,
        ),
    ] = None,
    space_only: Annotated[
        bool,
        typer.Option(
            "--space-only",
            help="While the root is served: have its files compacted, and remove nothing.",
        ),
    ] = False,
    store: RootStore = None,
    as_json: AsJson = False,
) -> None:
    """Remove what is past its time from a root that is not served, and free its space.

    Expired messages, done and failed entries past their retention, blobs without a message, and
    with --delete-when-done messages that all queues are done with. A broker does this by itself;
    a root that is served is refused, with the name of its owner. A dry run may read any root.
    With --space-only it works next to a broker: it owns nothing, and removes no rows.

    Examples:
      odq compact file:///var/lib/queues --dry-run
      odq compact s3://my-bucket/queues --every 1h
    """
    target = url_of(store, url)
    if is_remote(target):
        raise InvalidInputError(f"{target} is a server, which does this by itself: give its root")
    options = CompactorOptions(work_share=1.0, erase=erase, rewrite=rewrite)
    pause_ms = None if every is None else duration_ms(every)
    if pause_ms == 0:
        raise InvalidInputError("--every is 0: say how long to pause between two passes")
    if dry_run and every is not None:
        raise InvalidInputError("--dry-run runs once: leave out --every")

    async def once() -> RetentionReport:
        await check_root(target)
        if space_only:
            return await free_space_beside(target)
        if dry_run:
            return await plan_root(target, options=options)
        try:
            return await compact_root(target, options=options, delete_when_done=delete_when_done)
        except OwnedError as error:
            error.add_note(_OWNER_DOES_IT)
            raise

    if space_only and (dry_run or erase or rewrite or delete_when_done is not None):
        raise InvalidInputError("--space-only removes nothing: leave out the other options")
    if dry_run and delete_when_done is not None:
        raise InvalidInputError("--dry-run touches nothing: leave out --delete-when-done")
    if dry_run and rewrite:
        raise InvalidInputError("--dry-run touches nothing: leave out --rewrite")
    show = partial(_show, as_json=as_json, found_nothing=_NO_ROWS if space_only else _NOTHING)
    if pause_ms is None:
        show(run(once()))
        return
    with suppress(asyncio.CancelledError):
        run(_for_ever(target, once, pause_ms, partial(show, line=True)))


async def _for_ever(target: str, once: Once, pause_ms: int, show: Show) -> None:
    """Pass after pass, until SIGTERM. A root that is served is tried again after the pause."""
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    with suppress(StoreUnavailableError):  # an outage may pass; other errors do not
        await check_root(target)
    while True:
        try:
            show(await once())
        except OdqError as error:
            complain(f"{error}; the next try is in {duration_text(pause_ms)}")
        await asyncio.sleep(pause_ms / 1000)


def _show(
    report: RetentionReport, *, as_json: bool, found_nothing: str, line: bool = False
) -> None:
    if as_json:
        print_json(report.as_json(), line=line)
        return
    if report.is_empty:
        typer.echo(found_nothing)
    else:
        title = "would be removed" if report.dry_run else "removed"
        print_table((title, "queue", "count", "because"), report.rows())
    print_fields(_fields(report))


def _fields(report: RetentionReport) -> list[tuple[str, object]]:
    fields: list[tuple[str, object]] = [("time", time_text(report.now_ms))]
    if report.bytes_freed is not None:
        fields += [
            ("bytes before", _size(report.bytes_before or 0)),
            ("bytes after", _size(report.bytes_after or 0)),
        ]
        if report.bytes_freed >= 0:  # files that were replaced may be there along with the new ones
            fields.append(("bytes freed", _size(report.bytes_freed)))
    elif report.bytes_before is not None:
        fields.append(("bytes", _size(report.bytes_before)))
    if report.row_bytes:
        fields.append(("rows past their time", _size(report.row_bytes)))
    if report.aging_bytes:
        fields.append(("freed in an hour", _size(report.aging_bytes)))
    if report.blob_bytes:
        fields.append(("blobs", _size(report.blob_bytes)))
    if report.rewritten:
        fields.append(("rewritten", ", ".join(report.rewritten)))
    took = duration_text(report.duration_ms)
    return [*fields, ("took", took), ("requests", report.requests)]


def _size(size_bytes: float) -> str:
    power = 0
    while abs(size_bytes) >= 1_000 and power < len(_BYTES) - 1:
        size_bytes /= 1_000
        power += 1
    return f"{size_bytes:.{1 if power else 0}f} {_BYTES[power]}"
