"""``odq tailer``: route what other processes publish, and own the queues."""

from __future__ import annotations

from typing import Annotated

import typer

from opendata_queue.cli.serve import options
from opendata_queue.cli.serve.running import run_server
from opendata_queue.root.owner_files import DEFAULT_LEASE_MS
from opendata_queue.root.roles import Role


def tailer(
    store: options.Store,
    port: Annotated[
        int | None,
        typer.Option(
            envvar="ODQ_PORT",
            help="Serve claims, /healthz and /metrics on this port, too; 0 takes a free one.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(envvar="ODQ_HOST", help="The address to listen on, with --port.")
    ] = "127.0.0.1",
    advertise: options.Advertise = None,
    jwt_secret: options.JwtSecret = None,
    jwt_key_file: options.JwtKeyFile = None,
    jwt_audience: options.JwtAudience = None,
    jwt_issuer: options.JwtIssuer = None,
    standby: options.Standby = False,
    takeover: options.Takeover = False,
    owner_lease_ms: options.OwnerLeaseMs = DEFAULT_LEASE_MS,
    linger_ms: options.LingerMs = 0,
    retention_every: options.RetentionEvery = "60s",
    erase_expired: options.EraseExpired = False,
    insecure: options.Insecure = False,
    open_metrics: options.OpenMetrics = False,
    log_json: options.LogJson = False,
) -> None:
    """Follow what other processes publish into a root, and route it into its queues.

    It owns the queues, and publishes nothing. With --port it serves claims, too; without, it is a
    daemon that only routes. It goes on until SIGTERM or SIGINT, and exits with 0 then.

    Example: odq tailer --store s3://bucket/orders --port 8081
    """
    run_server(
        store,
        log_json=log_json,
        only_routes=port is None,
        role=Role.QUEUES,
        host=host,
        port=port or 0,
        jwt_secret=jwt_secret,
        jwt_key_file=jwt_key_file,
        jwt_audience=jwt_audience,
        jwt_issuer=jwt_issuer,
        advertise=advertise,
        standby=standby,
        takeover=takeover,
        owner_lease_ms=owner_lease_ms,
        linger_ms=linger_ms,
        retention_every=retention_every,
        erase_expired=erase_expired,
        insecure=insecure,
        open_metrics=open_metrics,
    )
