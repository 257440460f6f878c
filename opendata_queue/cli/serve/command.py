"""``odq serve``: offer a root over HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from opendata_queue.cli.serve import options
from opendata_queue.cli.serve.running import run_server
from opendata_queue.root.owner_files import DEFAULT_LEASE_MS
from opendata_queue.root.roles import Role


def serve(
    store: options.Store,
    host: Annotated[
        str, typer.Option(envvar="ODQ_HOST", help="The address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="ODQ_PORT", help="The port to listen on; 0 takes a free one.")
    ] = 8080,
    role: Annotated[
        Role,
        typer.Option(
            envvar="ODQ_ROLE",
            help="all: publish and serve queues. ingest: publish only, next to any number of "
            "others. queues: serve the queues of what ingest processes publish.",
        ),
    ] = Role.ALL,
    jwt_secret: options.JwtSecret = None,
    jwt_key_file: options.JwtKeyFile = None,
    jwt_audience: options.JwtAudience = None,
    jwt_issuer: options.JwtIssuer = None,
    advertise: options.Advertise = None,
    standby: options.Standby = False,
    takeover: options.Takeover = False,
    owner_lease_ms: options.OwnerLeaseMs = DEFAULT_LEASE_MS,
    linger_ms: options.LingerMs = 0,
    retention_every: options.RetentionEvery = "60s",
    erase_expired: options.EraseExpired = False,
    insecure: options.Insecure = False,
    open_metrics: options.OpenMetrics = False,
    rate: Annotated[
        float | None,
        typer.Option(envvar="ODQ_RATE", help="Messages and requests a second, per namespace."),
    ] = None,
    rate_burst: Annotated[
        int, typer.Option(envvar="ODQ_RATE_BURST", help="How many may come at once.")
    ] = 1_000,
    max_body_bytes: Annotated[
        int, typer.Option(envvar="ODQ_MAX_BODY_BYTES", help="The longest request body.")
    ] = 72 * 1024 * 1024,
    max_bodies_bytes: Annotated[
        int,
        typer.Option(
            envvar="ODQ_MAX_BODIES_BYTES",
            help="Of all request bodies together, beyond which one more is refused with 503.",
        ),
    ] = 256 * 1024 * 1024,
    max_connections: Annotated[
        int, typer.Option(envvar="ODQ_MAX_CONNECTIONS", help="Connections at the same time.")
    ] = 2_000,
    header_timeout_ms: Annotated[
        int,
        typer.Option(
            envvar="ODQ_HEADER_TIMEOUT_MS", help="How long a client may take to say what it wants."
        ),
    ] = 10_000,
    body_timeout_ms: Annotated[
        int,
        typer.Option(
            envvar="ODQ_BODY_TIMEOUT_MS", help="How long a client may pause within a body."
        ),
    ] = 30_000,
    idle_timeout_ms: Annotated[
        int,
        typer.Option(
            envvar="ODQ_IDLE_TIMEOUT_MS", help="How long a connection is kept between requests."
        ),
    ] = 75_000,
    write_timeout_ms: Annotated[
        int,
        typer.Option(
            envvar="ODQ_WRITE_TIMEOUT_MS",
            help="How long a client may read nothing of an answer that waits for it.",
        ),
    ] = 30_000,
    max_unsent_bytes: Annotated[
        int,
        typer.Option(
            envvar="ODQ_MAX_UNSENT_BYTES",
            help="Of all answers together that are made, or wait to be read; beyond that, "
            "requests for messages get 503.",
        ),
    ] = 256 * 1024 * 1024,
    shutdown_timeout_ms: Annotated[
        int,
        typer.Option(
            envvar="ODQ_SHUTDOWN_TIMEOUT_MS", help="How long requests may take to end on SIGTERM."
        ),
    ] = 30_000,
    access_log: Annotated[
        bool,
        typer.Option("--access-log", envvar="ODQ_ACCESS_LOG", help="Log each request as JSON."),
    ] = False,
    log_json: options.LogJson = False,
) -> None:
    """Own a root, and offer it over HTTP until SIGTERM or SIGINT.

    The API is described at /docs. Without a secret or key for tokens only this machine may
    connect. Exits with 0 after a signal, and with 1 when it can't go on.

    Several processes can share the work: as many as needed with --role ingest, and one with
    --role queues, or odq tailer. Each sends clients on to the process that serves what they ask
    for.

    Example: odq serve --store file:///var/lib/orders --port 8080
    """
    run_server(
        store,
        log_json=log_json,
        host=host,
        port=port,
        jwt_secret=jwt_secret,
        jwt_key_file=jwt_key_file,
        jwt_audience=jwt_audience,
        jwt_issuer=jwt_issuer,
        role=role,
        advertise=advertise,
        standby=standby,
        takeover=takeover,
        owner_lease_ms=owner_lease_ms,
        linger_ms=linger_ms,
        retention_every=retention_every,
        erase_expired=erase_expired,
        insecure=insecure,
        open_metrics=open_metrics,
        rate_per_second=rate,
        rate_burst=rate_burst,
        max_body_bytes=max_body_bytes,
        max_bodies_bytes=max_bodies_bytes,
        max_connections=max_connections,
        header_timeout_ms=header_timeout_ms,
        body_timeout_ms=body_timeout_ms,
        idle_timeout_ms=idle_timeout_ms,
        write_timeout_ms=write_timeout_ms,
        max_unsent_bytes=max_unsent_bytes,
        shutdown_timeout_ms=shutdown_timeout_ms,
        access_log=access_log,
    )
