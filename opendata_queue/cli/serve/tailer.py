"""``odq tailer``: route what other processes publish, and own the queues."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import ValidationError

from opendata_queue.cli.common import duration_ms
from opendata_queue.cli.serve import options
from opendata_queue.cli.serve.command import WRONG, announce, fail, read_key, wrong_settings
from opendata_queue.model.errors import OdqError
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
    try:
        from opendata_queue.http.requests.logs import log_to_stderr
        from opendata_queue.http.server import serving
        from opendata_queue.http.settings import ServerSettings
    except ImportError as error:
        fail(f"{error}: install opendata-queue[server]")
    log_to_stderr(as_json=log_json)
    try:
        settings = ServerSettings(
            role=Role.QUEUES,
            host=host,
            port=port or 0,
            jwt_key=read_key(jwt_secret, jwt_key_file),
            jwt_audience=jwt_audience,
            jwt_issuer=jwt_issuer,
            advertise=advertise,
            standby=standby,
            takeover=takeover,
            owner_lease_ms=owner_lease_ms,
            linger_ms=linger_ms,
            retention_interval_ms=duration_ms(retention_every),
            erase_expired=erase_expired,
            insecure=insecure,
            open_metrics=open_metrics,
        )
        run = serving.run_tailer if port is None else serving.run
        run(store, settings, announce=announce)
    except ValidationError as error:
        fail(wrong_settings(error), WRONG)
    except OdqError as error:
        fail(str(error))
