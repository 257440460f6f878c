"""For users: the options of a client, as the guide and ``connect`` name them."""

from opendata_queue.http.client import RemoteSystem
from opendata_queue.http.client_options import ClientOptions

__all__ = ["ClientOptions", "RemoteSystem"]
