"""fetched: one version of an agent, or of an object store, here while a command uses it; with a progress line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from weightsync.cli.shared import own_name, sigterm_raises
from weightsync.clients.store import client_at
from weightsync.errors import ConfigError, NotRegisteredError
from weightsync.host.puller import Puller
from weightsync.host.staged_version import StagedVersion
from weightsync.objects.urls import asked_url, is_store_url
from weightsync.types import Deadline
from weightsync.types.transfer_messages import Transport


@contextlib.contextmanager
def fetched(
    endpoint: str,
    model_id: str | None,
    *,
    token: str | None,
    verify: bool | str,
    trust_key: str | None,
    sources: Sequence[str],
    transport: Transport | None,
    num_streams: int,
    timeout_s: float,
    version: int | None = None,
) -> Iterator[StagedVersion]:
    """The newest version, proved.

    Args:
        endpoint: of an agent, or a place in a store.
        model_id: which; what is there where not given.
        token, verify, trust_key, num_streams, transport: see `Puller`.
        sources: other agents that may be called.
        timeout_s: that it may take.
        version: another one than the newest, of a store.

    Raises:
        ConfigError: an agent has no version but its newest; or one that was not named has a part of it.
        WeightSyncError: see `Puller.pull`.
    """
    stored = is_store_url(endpoint)
    if not stored and "://" not in endpoint:
        raise ConfigError(
            f"{endpoint} is no URL: name an agent, http://HOST:PORT, or a place in a store, "
            "s3://bucket/run, gs://..., az://..., file:///whole/path"
        )
    if version is not None:
        if not stored:
            raise ConfigError(f"{endpoint} is an agent, which has its newest version alone: leave --version out")
        endpoint = asked_url(endpoint.rstrip("/"), version=version)
    sigterm_raises()
    deadline = Deadline(timeout_s)
    if model_id is None:
        client = client_at(endpoint, token=token, verify=verify, trust_key=trust_key)
        with contextlib.closing(client):
            model_id = client.get_version().model_id
    puller = Puller(
        endpoint, model_id, receiver_id=own_name("pull"), token=token, verify=verify, transport=transport,
        mode="auto" if stored else "full", num_streams=num_streams, trust_key=trust_key,
        may_call={each.rstrip("/") for each in sources}.__contains__,  # the token goes to nobody else
    )  # fmt: skip
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        disable=not sys.stderr.isatty(),
    )  # fmt: skip
    try:
        with bar:
            task = bar.add_task(f"pulling {model_id}", total=None)
            pulled = puller.pull(
                deadline=deadline, progress=lambda done, total: bar.update(task, completed=done, total=total)
            )
        with pulled:
            yield pulled
    except NotRegisteredError as error:
        raise ConfigError(f"{error.message}; `weightsync pull` takes it with --source URL") from error
    finally:
        puller.close()
