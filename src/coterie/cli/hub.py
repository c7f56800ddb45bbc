"""Where no network is: what is on the disk is taken, and nothing waits for the hub."""

from __future__ import annotations

import os
import socket
from importlib.util import find_spec
from urllib.parse import urlparse

_PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def reachable() -> bool:
    """Whether the hub's name is known here. Behind a proxy it need not be, and the proxy knows."""
    from huggingface_hub import constants

    host = urlparse(constants.ENDPOINT).hostname
    if host is None or any(os.environ.get(name) for name in _PROXIES):
        return True
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def look_on_the_disk_alone() -> None:
    """What HF_HUB_OFFLINE=1 does, which is read when the packages are imported. Otherwise they ask for a minute."""
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True
    if find_spec("datasets"):
        import datasets

        datasets.config.HF_HUB_OFFLINE = True
