"""The checks of ``odq doctor`` for a root."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Final

from odq_encodings import ClockKey, ClockMark
from opendata_queue.cli.common import duration_text, note, plural, root_location, time_text
from opendata_queue.cli.doctor.counters import check_counters
from opendata_queue.cli.doctor.deep import FILES, check_deep, check_files
from opendata_queue.cli.doctor.findings import Finding, Level, fail, ok, warn
from opendata_queue.cli.doctor.permissions import check_permissions
from opendata_queue.cli.doctor.store import check_garbage, describe
from opendata_queue.cli.inspect.live_rows import QUEUES, LiveRoot
from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import (
    AccessProblem,
    CorruptStoreError,
    FormatVersionError,
    OdqError,
    StoreAccessError,
    StoreUnavailableError,
)
from opendata_queue.model.paths import messages_path
from opendata_queue.root.descriptor import DESCRIPTOR_PATH, described
from opendata_queue.root.features import check_features, named_features
from opendata_queue.root.owner_files import QUEUES_ROLE, OwnerFiles
from opendata_queue.root.timekeeping import reading_clock
from opendata_queue.store import Location, Objects, S3Access, StoreKind, StoreSettings

_SETTINGS: Final = StoreSettings(request_timeout_ms=5_000, outage_timeout_ms=10_000)
_SKEW_MS: Final = 2_000


async def check_root(
    url: str, clock: Clock, *, read_only: bool, deep: bool
) -> AsyncIterator[Finding]:
    """One finding after the other, up to one that makes the remaining checks pointless."""
    try:
        location = root_location(url)
    except StoreAccessError as error:
        yield fail("url", str(error), "fix the URL")
        return
    yield ok("url", f"{location} is a root's")
    if location.kind is StoreKind.S3:
        finding = _check_environment()
        yield finding
        if finding.level is Level.FAIL:
            return
    objects, finding = await _reach(location, url)
    yield finding
    if objects is None:
        return
    checks = [_check_descriptor, _check_features]
    if not read_only:
        checks.insert(1, _check_store)
    for check in checks:
        findings = await check(objects)
        for finding in findings:
            yield finding
        if any(finding.level is Level.FAIL for finding in findings):
            return
    if location.kind is StoreKind.FILE:
        yield check_permissions(location)
    served = False
    try:
        finding, served = await _check_owner(objects, clock)
        yield finding
    except OdqError as error:
        yield fail("owner", str(error), "listing objects must be permitted")
    files = check_deep(objects, clock, note) if deep else check_files(objects, clock)
    damaged = False
    async for finding in files:
        damaged = damaged or (finding.check == FILES and finding.level is Level.FAIL)
        yield finding
    if damaged:
        return  # SlateDB would ask for ever for what is missing
    async with AsyncExitStack() as stack:
        async for finding in _check_databases(LiveRoot(objects, stack), clock, served=served):
            yield finding


def _check_environment() -> Finding:
    """Where S3 is, and where the keys to it come from."""
    try:
        access = S3Access.from_environment()
    except StoreAccessError as error:
        return fail("environment", str(error), "S3 is configured as for other AWS tools")
    if access.endpoint is not None and access.source == S3Access().source:
        advice = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        return warn("environment", f"{access}: such a role is Amazon's own", advice)
    return ok("environment", str(access))


async def _reach(location: Location, url: str) -> tuple[Objects | None, Finding]:
    if location.kind is StoreKind.FILE and not location.folder.is_dir():
        advice = f"fix the path, or make a root with `odq init {url}`"
        return None, fail("reachable", f"there is no folder {location.folder}", advice)
    try:
        objects = Objects.open(url, _SETTINGS)
        await objects.read(DESCRIPTOR_PATH)
    except StoreAccessError as error:
        advice = (
            "`odq init --create-bucket` makes a bucket"
            if error.problem is AccessProblem.NO_BUCKET
            else ("check the credentials and what they permit")
        )
        return None, fail("reachable", str(error), advice)
    except StoreUnavailableError as error:
        advice = "check the endpoint and the network; a firewall may drop what is sent"
        return None, fail("reachable", str(error), advice)
    return objects, ok("reachable", "the store answers")


async def _check_descriptor(objects: Objects) -> list[Finding]:
    content = await objects.read(DESCRIPTOR_PATH)
    if content is None:
        advice = f"make one with `odq init {objects.location}`, or fix the URL"
        return [fail("system.json", "there is no root here", advice)]
    try:
        descriptor = described(content, objects.location.url_of(DESCRIPTOR_PATH))
    except CorruptStoreError as error:
        advice = "restore it from a copy: without its secret no receipt is valid"
        return [fail("system.json", str(error), advice)]
    except FormatVersionError as error:
        return [fail("system.json", str(error), "upgrade opendata-queue")]
    made = time_text(descriptor.created_at)
    version = descriptor.format_version
    found = f"instance {descriptor.instance_id}, made {made}, format version {version}"
    return [ok("system.json", found)]


async def _check_features(objects: Objects) -> list[Finding]:
    try:
        features = await named_features(objects)
        await check_features(objects, features)
    except FormatVersionError as error:
        return [fail("features", str(error), "upgrade opendata-queue")]
    if not features:
        return [ok("features", "none: the first open for writing by this release brings them in")]
    return [ok("features", ", ".join(sorted(features)))]


async def _check_store(objects: Objects) -> list[Finding]:
    """What the store can do, tried now; the root remembers it."""
    try:
        return describe(await objects.probe(), objects.location.kind)
    except OdqError as error:
        advice = "writing and deleting objects must be permitted"
        return [fail("conditional writes", str(error), advice)]


# --- who has it -----------------------------------------------------------------------------------


async def _check_owner(objects: Objects, clock: Clock) -> tuple[Finding, bool]:
    """Who serves it, as far as the store knows, and whether it is alive."""
    tenure = await OwnerFiles(objects, QUEUES_ROLE).newest()
    if tenure is None:
        return ok("owner", "no process has served it yet"), False
    if tenure.owner is None or tenure.last_sign_at is None:
        advice = "the next one to open it with takeover=True takes over"
        return warn("owner", f"the file of epoch {tenure.epoch} is damaged", advice), False
    if tenure.released:
        return ok("owner", f"none: {tenure.owner} has given it up"), False
    silent_ms = max(0, clock.now_ms() - tenure.last_sign_at)
    if silent_ms > tenure.lease_ms + _SKEW_MS:
        silence = f"{tenure.owner} is silent for {duration_text(silent_ms)}"
        advice = f"its lease is {tenure.lease_ms} ms: if it does not run any more, others take over"
        return warn("owner", silence, advice), False
    return ok("owner", f"{tenure.owner}, alive {duration_text(silent_ms)} ago"), True


# --- what is in it --------------------------------------------------------------------------------


async def _check_databases(root: LiveRoot, clock: Clock, *, served: bool) -> AsyncIterator[Finding]:
    usable = True
    for path in (messages_path(0), QUEUES):
        finding = await _check_database(root, path)
        usable = usable and finding.level is Level.OK
        yield finding
    if not usable:
        return
    paths = (messages_path(0), QUEUES)
    yield await check_garbage(root.objects, paths, clock, served=served)
    yield await _check_clock(root, root.objects, clock)
    queues = await root.queue_ids()
    yield ok("queues", plural(len(queues), "queue"))
    for finding in await check_counters(root):
        yield finding


async def _check_database(root: LiveRoot, path: str) -> Finding:
    try:
        database = await root.database(path)
    except OdqError as error:
        return fail(path, str(error), "check that its files are all there and can be read")
    if database is None:
        return warn(path, "there is no database yet", "it is made when the root is first opened")
    return ok(path, "can be read")


async def _check_clock(root: LiveRoot, objects: Objects, clock: Clock) -> Finding:
    rows = await root.get(QUEUES, [ClockKey().encode()])
    if not rows:
        return ok("clock", "no time was noted yet")
    time = await reading_clock(objects, clock)
    time.start_no_earlier(ClockMark.decode(rows[0].value).now)
    if abs(time.ahead_ms) <= _SKEW_MS:
        return ok("clock", "the root's clock and this machine's agree")
    apart = f"{duration_text(abs(time.ahead_ms))} {'ahead of' if time.ahead_ms > 0 else 'behind'}"
    return warn(
        "clock",
        f"the root's clock is {apart} this machine's",
        "let all machines follow the same time (NTP): leases, delays and retentions are right, "
        "but the times that are shown differ until the root's clock agrees again",
    )
