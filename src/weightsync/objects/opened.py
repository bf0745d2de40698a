"""open_store: the store that a URL names."""

from __future__ import annotations

from weightsync.objects.cloud import CloudStore
from weightsync.objects.folder import FolderStore, check_folder
from weightsync.objects.repeating import Repeating
from weightsync.objects.urls import checked_store_url


def open_store(url: str, *, whose: str = "a store's") -> Repeating:
    """Opens a place; nothing is asked yet.

    Raises:
        ConfigError: the URL is none.
        MissingDependencyError: it needs obstore, which is not installed.
    """
    url = checked_store_url(url, whose=whose)
    if url.startswith("file://"):
        check_folder(url)
        return Repeating(FolderStore(url))
    return Repeating(CloudStore(url))
