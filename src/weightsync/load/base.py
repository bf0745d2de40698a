"""WeightLoader: how weights enter one engine worker. Knows no transport and no codec."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from weightsync.errors import StateError, UnsupportedError
from weightsync.types import HeldTensor, Manifest, Update, Version

if TYPE_CHECKING:
    import torch

    from weightsync.load.patching import Change


class WeightLoader(abc.ABC):
    """Loads weights into the model of one engine worker.

    The bracket, driven by one thread at a time, in this order:

    1. `begin(manifest)` checks everything that can be checked before a byte moves.
    2. `load_weights(updates)` for each chunk, in the stream's order. When it returns, the loader has let
       go of the updates' memory: the transport reuses it.
    3. `verify()` after the last chunk: everything arrived.
    4. `live_tensors()` gives what `commit` will serve, so that it can be proved.
    5. `commit(version)`: from here on the engine serves it. Called while generation is paused.
       Or `abort(reason)` at any point after begin.

    The bracket of a patch, for loaders that accept it, on what is live now:

    1. `begin_patch(manifest)` instead of `begin`.
    2. `load_weights(updates)` with patches alone, each tensor at most once; it copies and checks them.
    3. `prepare_patch()` instead of `verify` and `live_tensors`: gives what will change, so that it can be proved.
    4. `commit(version)` writes it into the live weights, in the pause, and reads it again. One that fails has undone
       it: the loader is healthy and serves exactly what it did before. Until then live weights are only read.
    5. `rollback()` undoes that commit, exactly, because it failed elsewhere; or `settle()` forgets how. The next begin
       settles too.

    Attributes:
        accepts: kinds of updates it takes, of "full" and "patch".
        artifacts: kinds of publications it takes, of "model" and "lora".
        writes_live: whether `load_weights` touches weights that are being served. Then the engine is paused
            before the first chunk, and an abort leaves it refusing to serve (`healthy` is False) until
            a later sync commits.
        proved: whether the last full commit has compared the live weights with what was loaded, to the bit. For
            loaders whose live weights can't be read before the commit.
        audits_copy: whether `audited` gives a copy of what is live, which the next `begin` overwrites.
    """

    accepts: ClassVar[frozenset[str]] = frozenset({"full"})
    artifacts: ClassVar[frozenset[str]] = frozenset({"model"})
    writes_live: bool = False
    proved: bool = False
    audits_copy: ClassVar[bool] = False

    @property
    def healthy(self) -> bool:
        """Whether the live weights are those of one committed version (or of construction)."""
        return True

    @property
    def device_index(self) -> int | None:
        """The GPU that the live weights are on, or the first of several; None: the current one of whoever made the
        engine. Transfers meet there."""
        return None

    @property
    def takes_patch(self) -> bool:
        """Whether a patch can be made on what is served though its live weights are not proved: all of it lies in host
        memory, and what can't be written where it is live is loaded again from there."""
        return False

    @property
    def can_roll_back(self) -> bool:
        """Whether `rollback` would undo the last commit."""
        return False

    def distrust(self) -> None:  # noqa: B027  (most build on nothing that was there)
        """What is live is not what was committed, as somebody has found: the next full load writes all of it, and until
        then no patch is made on it. Outside of a bracket."""

    def lost(self) -> str | None:
        """Why the live weights are not those of the last commit any more, where somebody else can change them; None:
        they are. Asked now and then, from any thread; takes some seconds at most.

        Raises:
            WeightSyncError: it can't be known now.
        """
        return None

    @abc.abstractmethod
    def begin(self, manifest: Manifest) -> None:
        """Opens the bracket.

        Raises:
            ManifestMismatchError: wrong shape or dtype, a missing or an extra name. Nothing was changed.
            StateError: a bracket is open already.
        """

    @abc.abstractmethod
    def load_weights(self, updates: Iterable[Update]) -> None:
        """Takes the updates of one chunk.

        Raises:
            WeightSyncError: the update doesn't fit; the caller aborts.
        """

    @abc.abstractmethod
    def verify(self) -> None:
        """Checks that every tensor of the manifest was loaded exactly once.

        Raises:
            ManifestMismatchError: some did not arrive; the caller aborts.
        """

    @abc.abstractmethod
    def live_tensors(self) -> Iterator[HeldTensor]:
        """The memory that serves, in manifest coordinates; between `verify` and `commit` that which will serve.

        Raises:
            UnsupportedError: the engine repacked or quantised them, so they are unprovable; says why.
        """

    def base_tensors(self) -> Mapping[str, torch.Tensor] | None:
        """Of a loader of adapters: the live weights of the base, under its own names, as they are without any adapter;
        None where nobody can tell. An adapter on another base is refused by their digest.
        """
        return None

    def audited(self) -> Iterator[HeldTensor]:
        """What an audit sums up, outside of a bracket: the live tensors, or a copy of them that `differs` compares.

        Raises:
            UnsupportedError: as for `live_tensors`.
        """
        return self.live_tensors()

    def differs(self, name: str) -> str | None:
        """How the live elements of a tensor differ from what `audited` gave of it, in words; None: not at all."""
        return None

    def moved(self) -> str | None:
        """Why what `audited` gave is not what serves any more, at the end of an audit; None where it is."""
        return None

    def live_whole(self) -> Mapping[str, torch.Tensor] | None:
        """What `live_tensors` gives, all at once and by name, where every tensor lies here whole, in memory that stays.
        None where it does not, or has to be read in another way.

        Raises:
            UnsupportedError: as for `live_tensors`.
        """
        return None

    def live_digest(self) -> str | None:
        """The model digest of what `live_tensors` would give, where whoever has that memory computes it there; None
        where it is to be computed from them.

        Raises:
            UnsupportedError: as for `live_tensors`.
        """
        return None

    @abc.abstractmethod
    def commit(self, version: Version) -> None:
        """Makes the loaded weights the served ones and closes the bracket. Keep it short: generation is paused."""

    @abc.abstractmethod
    def abort(self, reason: str) -> None:
        """Closes the bracket without serving what was loaded. Idempotent; the next `begin` works."""

    def begin_patch(self, manifest: Manifest) -> None:
        """Opens the bracket of a patch on the live weights.

        Raises:
            UnsupportedError: this loader, or this model, can never be patched. Nothing was changed.
            ManifestMismatchError: wrong shape or dtype, a missing or an extra name. Nothing was changed.
            StateError: a bracket is open already, what is live is half-loaded, or something else that passes.
        """
        raise UnsupportedError("this loader takes whole tensors alone", state_left="nothing was changed")

    def prepare_patch(self) -> Iterator[Change]:
        """Everything that a commit needs and that can be done before the pause; reads the live weights.

        Returns:
            What will change, tensor by tensor, with what is there now. Borrowed until the bracket ends.

        Raises:
            LoadError: the live weights can't be read. The caller aborts.
        """
        raise StateError("no patch is under way: begin_patch first", state_left="nothing was changed")

    def rollback(self) -> None:
        """Undoes the last commit, where that was a patch which nobody has settled.

        Raises:
            StateError: there is no such commit. Nothing was changed.
            LoadError: it could not be undone; `healthy` is False until a later full load commits.
        """
        raise StateError("there is no patch to roll back", state_left="nothing was changed")

    def settle(self) -> None:  # noqa: B027  (nothing is kept where there are no patches)
        """The last commit stays: forgets what `rollback` would need. Idempotent."""
