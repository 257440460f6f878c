"""Options that ``odq serve`` and ``odq tailer`` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

JWT_SECRET_VARIABLE: Final = "ODQ_JWT_SECRET"
JWT_KEY_FILE_VARIABLE: Final = "ODQ_JWT_KEY_FILE"

Store = Annotated[
    str,
    typer.Option(
        envvar="ODQ_STORE", metavar="URL", help="The root: file:///path or s3://bucket/prefix."
    ),
]
JwtSecret = Annotated[
    str | None,
    typer.Option(
        envvar=JWT_SECRET_VARIABLE,
        help="The secret of HS256 tokens, 32 bytes or more. Better set as ODQ_JWT_SECRET: "
        "arguments can be seen by others.",
    ),
]
JwtKeyFile = Annotated[
    Path | None,
    typer.Option(
        envvar=JWT_KEY_FILE_VARIABLE,
        help="A file with that secret, or with a public key in PEM for RS256 and ES256.",
    ),
]
JwtAudience = Annotated[
    str | None, typer.Option(envvar="ODQ_JWT_AUDIENCE", help="The audience that tokens must name.")
]
JwtIssuer = Annotated[
    str | None, typer.Option(envvar="ODQ_JWT_ISSUER", help="The issuer that tokens must name.")
]
Advertise = Annotated[
    str | None,
    typer.Option(
        envvar="ODQ_ADVERTISE",
        metavar="URL",
        help="Where others reach it, if that is not where it listens.",
    ),
]
Standby = Annotated[
    bool,
    typer.Option(
        "--standby", envvar="ODQ_STANDBY", help="Wait until no process serves it, then serve it."
    ),
]
Takeover = Annotated[
    bool,
    typer.Option("--takeover", help="Take it from the process that serves it; not with --standby."),
]
OwnerLeaseMs = Annotated[
    int,
    typer.Option(envvar="ODQ_OWNER_LEASE_MS", help="After so long a silence a standby takes over."),
]
LingerMs = Annotated[
    float,
    typer.Option(
        envvar="ODQ_LINGER_MS",
        help="How long a commit waits for company: saves requests to S3, costs latency.",
    ),
]
RetentionEvery = Annotated[
    str,
    typer.Option(
        envvar="ODQ_RETENTION_EVERY",
        metavar="TIME",
        help="How often what is past its time is removed, such as 60s or 5m; 0s for never.",
    ),
]
EraseExpired = Annotated[
    bool,
    typer.Option(
        "--erase-expired",
        envvar="ODQ_ERASE_EXPIRED",
        help="Delete expired messages at their deadline, and not an hour later for free.",
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Listen to other machines without asking for tokens.")
]
OpenMetrics = Annotated[
    bool,
    typer.Option(
        "--open-metrics", envvar="ODQ_OPEN_METRICS", help="Give /metrics without a token."
    ),
]
LogJson = Annotated[
    bool,
    typer.Option("--log-json", envvar="ODQ_LOG_JSON", help="Log everything as lines of JSON."),
]
