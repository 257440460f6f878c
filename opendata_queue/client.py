"""For users: the options of a client, as the guide and ``connect`` name them."""

from opendata_queue.http.client import ClientOptions, RemoteSystem

__all__ = ["ClientOptions", "RemoteSystem"]
