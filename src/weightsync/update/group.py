"""TransferGroup: the engines and the sender that bytes travel between, kept fit from one update to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from weightsync.errors import GroupJoinError, as_weightsync_error
from weightsync.observe import Recorder
from weightsync.transfer.base import WeightTransferSender, WeightTransferStrategy, init_requests
from weightsync.types import AbortRequest, Deadline, EngineReply, InferenceEngineClient
from weightsync.types.manifest import ArtifactKind


class TransferGroup:
    """Of one model. For one thread at a time.

    Args:
        strategy: how bytes move.
        model_id: which model.
        join_timeout_s: how long building it may take.
        recorder: where phases go.

    Attributes:
        sender: of the present group; None while there is none.
    """

    def __init__(
        self, strategy: WeightTransferStrategy, *, model_id: str, join_timeout_s: float, recorder: Recorder
    ) -> None:
        self._strategy = strategy
        self._model_id = model_id
        self._join_timeout_s = join_timeout_s
        self._recorder = recorder
        self.sender: WeightTransferSender | None = None
        self._name: str | None = None
        self._members: tuple[str, ...] = ()
        self._run_id: str | None = None

    def join(
        self,
        client: InferenceEngineClient,
        replies: Mapping[str, EngineReply],
        *,
        run_id: str,
        deadline: Deadline,
        artifact: ArtifactKind = "model",
        returns: bool = False,
    ) -> None:
        """Sees to it that just these engines are in it, for this run, with a sender that can be used.

        Args:
            client: of these engines.
            replies: what each says of itself, in the order of the ranks.
            run_id: of the trainer; from here on the engines' current one.
            deadline: of the update.
            artifact: what will come.
            returns: see `InitRequest`.

        Raises:
            GroupJoinError: an engine did not join.
            VersionError: another run took over from that one in an engine.
            WeightSyncError: it says why it did not. There is no group then.
        """
        same = self._members == tuple(replies) and self._run_id == run_id
        joined = all(reply.group == self._name for reply in replies.values())
        if same and joined and self.sender is not None and self.sender.usable:
            return
        self.leave()
        with self._recorder.phase("join group"):
            limit = Deadline(min(self._join_timeout_s + 1.0, deadline.check("time to build the group")))
            sizes = {who: reply.world_size for who, reply in replies.items()}
            info, token = self._strategy.create_init_info(sizes)
            requests = init_requests(
                info, sizes, run_id=run_id, model_id=self._model_id, artifact=artifact, returns=returns
            )
            joining = client.init(requests, timeout_s=limit.check("time to build the group"))
            try:
                sender = self._strategy.create_sender(info, token, joined=joining, record=self._recorder.add)
                try:
                    joining.result(limit.remaining_s)
                except BaseException:
                    sender.close()
                    raise
            except BaseException as error:
                typed = as_weightsync_error(error, GroupJoinError, "engines did not join")
                if typed is error or not isinstance(error, Exception):  # Ctrl-C is no error of theirs
                    raise
                raise typed from error
        self.sender, self._name, self._members, self._run_id = sender, info.group_name, tuple(replies), run_id

    def end(self, client: InferenceEngineClient, *, timeout_s: float) -> None:
        """Tells the engines that their trainer ends in order, and leaves. Never raises; nor does it matter where one
        does not hear it: it holds the trainer for one that may come again.

        Args:
            client: of these engines, and perhaps others.
            timeout_s: how long they may take to answer.
        """
        self.leave()  # first: a member's end of an NCCL group may wait for this one
        if self._name is not None:
            with contextlib.suppress(Exception):
                members = client.only(self._members)
                members.abort(AbortRequest(session=self._name, reason="its trainer has ended"), timeout_s=timeout_s)
            self._name = None

    def leave(self) -> None:
        """The next `join` builds another one. Idempotent."""
        if self.sender is not None:
            self.sender.close()
        self.sender = None
