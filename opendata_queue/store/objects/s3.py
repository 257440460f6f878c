"""How S3 is reached: what AWS tools would take from the environment and from a profile.

The Rust clients read the environment by themselves, and know roles of machines and pods. What they
do not know is added here: profiles, the order in which endpoints count, and a CA of one's own. What
can't work is refused before anything is sent, since they would retry it for a minute.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit, urlunsplit

from opendata_queue.model.errors import StoreAccessError

_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_REGIONS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
_ROLES: Final = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
# Ways to credentials that end, and that would not be renewed here.
_BORROWED: Final = (
    *("sso_session", "sso_start_url", "role_arn", "credential_process", "login_session"),
    "web_identity_token_file",
)
_TRUSTED: Final = "SSL_CERT_FILE"
_YES: Final = ("true", "1", "yes", "on")


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Access:
    """Where S3 is, and who we are there. What is none is left to the clients' own defaults."""

    endpoint: str | None = None
    region: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    source: str = "the role of this machine"
    """Where the credentials come from, for people."""
    allow_http: bool = False
    virtual_hosted: bool = False
    """The bucket is a part of the host's name, not of the path."""
    ca_bundle: Path | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """What AWS tools would take; ``StoreAccessError`` says what is wrong with it."""
        profile = _Profile.read(environment)
        endpoint = _endpoint(environment, profile)
        key_id, secret, token, source = _credentials(environment, profile)
        return cls(
            endpoint=endpoint,
            region=_first(environment, _REGIONS) or profile.get("region"),
            access_key_id=key_id,
            secret_access_key=secret,
            session_token=token,
            source=source,
            allow_http=_allow_http(environment, endpoint),
            virtual_hosted=_virtual_hosted(environment, profile),
            ca_bundle=_ca_bundle(environment, profile),
        )

    def options(self, bucket: str) -> dict[str, str]:
        """What to tell a client beyond what it finds in the environment, as it calls it."""
        given = {
            "aws_endpoint": self.endpoint_for(bucket),
            "aws_region": self.region,
            "aws_access_key_id": self.access_key_id,
            "aws_secret_access_key": self.secret_access_key,
            "aws_session_token": self.session_token,
            "aws_virtual_hosted_style_request": "true" if self.virtual_hosted else None,
            "allow_http": "true" if self.allow_http else None,
        }
        return {name: value for name, value in given.items() if value is not None}

    def endpoint_for(self, bucket: str) -> str | None:
        """The endpoint of a bucket: the clients put its name into a path, but not into a host."""
        if self.endpoint is None or not self.virtual_hosted:
            return self.endpoint
        parts = urlsplit(self.endpoint)
        if parts.netloc.startswith(f"{bucket}."):
            return self.endpoint
        return urlunsplit(parts._replace(netloc=f"{bucket}.{parts.netloc}"))

    @contextmanager
    def trusted(self) -> Iterator[None]:
        """Clients that are made in this block trust the CA bundle; they have no other way in."""
        if self.ca_bundle is None:
            yield
            return
        before = os.environ.get(_TRUSTED)
        os.environ[_TRUSTED] = str(self.ca_bundle)
        try:
            yield
        finally:
            if before is None:
                del os.environ[_TRUSTED]
            else:
                os.environ[_TRUSTED] = before

    def __str__(self) -> str:
        where = self.endpoint or "Amazon S3"
        return f"{where}, region {self.region or 'us-east-1, since none is set'}, as {self.source}"


class _Profile:
    """What the shared files say of the profile that is asked for."""

    def __init__(self, name: str, files: list[dict[str, str]], services: dict[str, str]) -> None:
        self.name = name
        self._files = files
        self._services = services

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        asked = _first(environment, ("AWS_PROFILE", "AWS_DEFAULT_PROFILE"))
        name = asked or "default"
        home = Path(environment.get("HOME") or Path.home()) / ".aws"
        keys = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials")
        config = Path(environment.get("AWS_CONFIG_FILE") or home / "config")
        in_keys, in_config = _sections(keys), _sections(config)
        title = name if name == "default" else f"profile {name}"
        found = [one for one in (in_keys.get(name), in_config.get(title)) if one is not None]
        if asked and not found:
            raise StoreAccessError(
                f"AWS_PROFILE is {name!r}, and there is no such profile in {keys} or {config}"
            )
        service = next((one["services"] for one in found if "services" in one), "")
        return cls(name, found, in_config.get(f"services {service}", {}))

    def get(self, name: str) -> str | None:
        return next((one[name] for one in self._files if one.get(name)), None)

    def of_s3(self, name: str) -> str | None:
        """A setting that is for S3 alone, in a block of its own."""
        blocks = [one.get("s3", "") for one in (self._services, *self._files)]
        return next((value for block in blocks if (value := _nested(block).get(name))), None)

    @property
    def borrowed(self) -> str | None:
        """By which way it gets credentials that end, if it does."""
        return next((name for name in _BORROWED if self.get(name)), None)


def _sections(path: Path) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(strict=False, default_section="")
    try:
        parser.read_string(path.expanduser().read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        said = " ".join(str(error).split())
        raise StoreAccessError(f"{path} can't be read as a file of AWS profiles: {said}") from error
    return {title: dict(parser.items(title)) for title in parser.sections()}


def _nested(block: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in block.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _credentials(
    environment: Mapping[str, str], profile: _Profile
) -> tuple[str | None, str | None, str | None, str]:
    """Key, secret and session token, if the clients do not find them; and where they are from."""
    key_id = environment.get("AWS_ACCESS_KEY_ID")
    secret = environment.get("AWS_SECRET_ACCESS_KEY")
    if bool(key_id) != bool(secret):
        given, missing = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"
        if secret:
            given, missing = missing, given
        raise StoreAccessError(f"{given} is set and {missing} is not: set both, or neither")
    if key_id:
        return None, None, None, f"AWS_ACCESS_KEY_ID {key_id}"
    if environment.get("AWS_SESSION_TOKEN"):
        raise StoreAccessError("AWS_SESSION_TOKEN is set without the key that it belongs to")
    if environment.get("AWS_SKIP_SIGNATURE", "").lower() in _YES:
        return None, None, None, "nobody in particular (AWS_SKIP_SIGNATURE)"
    role = _first(environment, _ROLES)
    if role and not environment.get("AWS_PROFILE"):
        return None, None, None, "the role of this pod or container"
    key_id = profile.get("aws_access_key_id")
    if key_id:
        secret = profile.get("aws_secret_access_key")
        if not secret:
            raise StoreAccessError(f"profile {profile.name!r} has no aws_secret_access_key")
        return key_id, secret, profile.get("aws_session_token"), f"profile {profile.name!r}"
    if profile.borrowed:
        raise StoreAccessError(
            f"profile {profile.name!r} gets its credentials by {profile.borrowed}, and they end: "
            "put them into the environment (`aws configure export-credentials --format env`), or "
            "run where the machine or the pod has a role"
        )
    return None, None, None, "the role of this machine"


def _endpoint(environment: Mapping[str, str], profile: _Profile) -> str | None:
    for name in _ENDPOINTS:
        if environment.get(name):
            return _checked(environment[name], name)
    found = profile.of_s3("endpoint_url") or profile.get("endpoint_url")
    return found and _checked(found, f"endpoint_url of profile {profile.name!r}")


def _checked(endpoint: str, name: str) -> str:
    """An endpoint that the clients can take: what is none makes them panic."""
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise StoreAccessError(f"{name} is {endpoint!r}, not a URL like http://127.0.0.1:9000")
    return endpoint.rstrip("/")


def _allow_http(environment: Mapping[str, str], endpoint: str | None) -> bool:
    """An endpoint with http:// is allowed, unless AWS_ALLOW_HTTP forbids it."""
    said = environment.get("AWS_ALLOW_HTTP", "").lower()
    plain = endpoint is not None and endpoint.startswith("http://")
    if plain and said and said not in _YES:
        raise StoreAccessError(
            f"the endpoint {endpoint} has no TLS, and AWS_ALLOW_HTTP is {said!r}: use https://, "
            "or allow it"
        )
    return plain


def _virtual_hosted(environment: Mapping[str, str], profile: _Profile) -> bool:
    said = environment.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST")
    if said is not None:
        return said.lower() in _YES
    return profile.of_s3("addressing_style") == "virtual"


def _ca_bundle(environment: Mapping[str, str], profile: _Profile) -> Path | None:
    given = environment.get("AWS_CA_BUNDLE") or profile.get("ca_bundle")
    if not given:
        return None
    name = "AWS_CA_BUNDLE" if environment.get("AWS_CA_BUNDLE") else "ca_bundle"
    path = Path(given).expanduser()
    try:
        has_some = b"BEGIN CERTIFICATE" in path.read_bytes()
    except OSError as error:
        raise StoreAccessError(f"{name} is {given!r}: {error.strerror}") from error
    if not has_some:
        raise StoreAccessError(f"{name} is {given!r}, which holds no certificate in PEM")
    return path.absolute()


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((value for name in names if (value := environment.get(name))), None)
