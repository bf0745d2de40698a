"""FollowedRun: which run of one model is followed, what is to be pulled next, from whom, and when agents are asked.

Agents are who know. What one says of itself is kept as its record, and everything is decided from these records. What
others say of an agent (a notification, a controller) is a claim: a reason to ask that agent, and no more.

No thread, no socket, no clock of its own: `upstream` asks, and its owner's lock guards it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

from weightsync.errors import NotPublishedError, VersionError
from weightsync.host.adoption import ANOTHER_INCARNATION, Adoption, Verdict, published_anew
from weightsync.host.agent_state import OVERDUE_S, TURNS, AgentState, Ask, Claim, Target, is_in, lowest, nobody_has
from weightsync.host.runs_over import RunsOver
from weightsync.objects.urls import is_store_url
from weightsync.types import Version
from weightsync.types.transfer_messages import AgentVersion

_MAX_OTHERS = 8

_logger = logging.getLogger(__name__)
Served = Mapping[str, Version | None]
"""What each engine serves; None: nothing, or it does not say."""


class FollowedRun:
    """Of one model. Not thread-safe: its owner's lock.

    Args:
        model_id: which model.
        clock: seconds, rising.
        settle: told of which life of its trainer it is what was taken over from engines, see `EngineGroup.settle`.
        taken_over: called when another run took over.
        patience_s: how long an agent may lack what another one of its run has, before that one is pulled from.
        timeout_s: how long a claim waits for its agent's word.
        poll_s: agents are asked for ever, and after so long where they don't let a request wait. None: until each has
            named a version, and then where there is a reason.
        of_fleet: see `RunsOver`.

    Attributes:
        agents: by endpoint: those that may be called.
        run_id: what is followed; None: nothing yet.
        is_anew: it is published anew under numbers that are served, by another life of its trainer.
        count: rises with every claim and every run.
    """

    def __init__(
        self,
        model_id: str,
        *,
        clock: Callable[[], float],
        settle: Callable[[str | None], None],
        taken_over: Callable[[], None],
        patience_s: float,
        timeout_s: float,
        poll_s: float | None,
        of_fleet: bool = False,
    ) -> None:
        self._model_id = model_id
        self._clock = clock
        self._settle = settle
        self._taken_over = taken_over
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._poll_s = poll_s
        self.agents: dict[str, AgentState] = {}
        self.run_id: str | None = None
        self.is_anew = self._anew_since = False  # at all; and by another life than that of the last pull
        self.count = 0
        self._current: str | None = None
        self._pulled = -1
        self._loaded = True
        self._incarnation: str | None = None
        self._heard: str | None = None  # the life of the followed run that answered last
        self._adoption: Adoption | None = None
        self._runs_over = RunsOver(of_fleet=of_fleet)

    # --- what it is told ---

    def know(self, endpoint: str, *, lasting: bool = False) -> None:
        """That agent may be called; it is asked until it has named a version. `lasting`: see `AgentState`."""
        self.agents.setdefault(endpoint, AgentState(self._poll_s)).lasting |= lasting

    def wake(self, endpoint: str) -> None:
        """That agent is asked once, now."""
        self.agents[endpoint].wake(self._clock())

    def claim(self, version: Version, endpoint: str, *, grace_s: float | None) -> Claim:
        """Somebody says that an agent has a version: that agent is asked.

        Args:
            version, endpoint: what, and who; that agent is known.
            grace_s: see `Claim`; at most `patience_s`. None: nobody wants to hear of a denial.

        Raises:
            TransferAbortedError: another run took over from that one.
        """
        if not (returns := self._runs_over.may_return(version.run_id)):
            self._runs_over.check(version)
        self.count += 1
        now_s = self._clock()
        brought = version.run_id == self.run_id and version.number <= self._pulled
        made = Claim(
            number=self.count, version=version, endpoint=endpoint, began_s=now_s,
            grace_s=self._patience_s if grace_s is None else min(grace_s, self._patience_s),
            until_s=now_s + self._timeout_s, is_told=grace_s is not None, checked=not brought,
            there_s=now_s if brought else None, returns=returns,
        )  # fmt: skip
        self.agents[endpoint].add(made)
        self.wake(endpoint)
        return made

    def pulled(self, endpoint: str, version: Version, incarnation: str | None) -> None:
        """A version has come from an agent, proved."""
        self.agents[endpoint].broken = False
        if version.run_id != self.run_id:
            return
        self._current, self._pulled, self._loaded = endpoint, version.number, False
        self._incarnation, self._adoption = incarnation, None
        self._anew_since = self._anew_since and incarnation not in (None, self._heard)
        for agent in self.agents.values():
            agent.forget(self._clock(), version)

    def loaded(self, version: Version) -> None:
        """Every engine serves what was pulled last: that version."""
        self._loaded, self.is_anew = True, self._anew_since
        self._runs_over.loaded |= self.follows(version)

    def adopted(self, adoption: Adoption, endpoint: str | None = None) -> None:
        """Engines serve it already; where nothing is followed yet, that run is, from this agent, or the first to name
        it. Agents are asked whether it is theirs."""
        if self.run_id is None:
            self._adoption = adoption
            if endpoint is not None:
                self._follow(adoption.version.run_id, endpoint)
        self._runs_over.loaded |= self.follows(adoption.version)

    def struggles(self, endpoint: str) -> None:
        """A pull from an agent does not get on: has it gone? It is asked, once a second at most."""
        if self._clock() - self.agents[endpoint].woken_s >= OVERDUE_S:
            self.wake(endpoint)

    def failed(self, endpoint: str) -> None:
        """A pull from an agent has failed: others that have something come first, until one from it succeeds."""
        self.agents[endpoint].broken = True
        self._look_at_others(endpoint)

    def heard(self, endpoint: str, answer: AgentVersion, *, asked: Ask, asked_s: float) -> None:
        """What an agent has answered to a request that began at `asked_s`."""
        agent, newest = self.agents[endpoint], None
        if answer.run_id is not None and answer.version is not None:
            newest = Version(run_id=answer.run_id, number=answer.version)
        agent.coming, agent.ended = None, answer.ending
        if answer.coming_run_id is not None and answer.coming is not None:
            agent.coming = Version(run_id=answer.coming_run_id, number=answer.coming)
        before, turns = agent.newest, agent.num_turns
        agent.answered(newest, asked, asked_s=asked_s, now_s=self._clock(), life=answer.incarnation)
        if turns == TURNS < agent.num_turns:
            _logger.warning(
                "model %s: %s names one run after another, now %s: do several trainers answer at that address? It is "
                "asked now and then",
                self._model_id, endpoint, newest,
            )  # fmt: skip
        if newest is not None:
            self._take_up(endpoint, agent, before, newest)
        if self._adoption is not None:
            self._judge_adoption(self._adoption, answer)
        ours = newest is not None and newest.run_id == self.run_id
        if ours:
            self._heard = answer.incarnation
        if ours and answer.incarnation == self._incarnation:
            self.is_anew, self._anew_since = self.is_anew and not self._loaded, False
        if newest is not None and ours and newest.number <= self._pulled and self._is_another_life(answer):
            self.is_anew = self._anew_since = True  # though nobody claims anything
        unsure = self._adoption is not None and not self._adoption.sure and self._incarnation is None
        for claim in tuple(agent.claims):
            if not claim.checked and not unsure:
                self._check_life(claim, answer, asked_s, ours=ours)
            elif claim.checked and newest is not None:
                self._judge(agent, claim, answer, newest, before, asked_s)
        self._forget(agent)

    def not_heard(self, endpoint: str, why: str, *, gone: bool = False) -> None:
        """An agent could not be asked, or its answer can't be taken.

        Args:
            endpoint, why: whose, and why.
            gone: nobody answers there, as where a trainer has ended.
        """
        agent = self.agents[endpoint]
        why = agent.unheard(why, self._clock(), gone=gone and not is_store_url(endpoint))
        if agent.error is None and agent.ended:
            _logger.info("model %s: the trainer at %s has ended", self._model_id, endpoint)
        elif agent.is_news(why):
            _logger.warning("model %s: %s does not say what it has: %s", self._model_id, endpoint, why)
        agent.error, agent.why, agent.coming = why, why, None
        agent.pause(self._clock())
        self._forget(agent)
        if not agent.claims and (agent.newest is not None or self._is_past(endpoint)):
            agent.woken_s = -math.inf  # it may have ended long ago
        if agent.claims or endpoint == self._current:
            self._look_at_others(endpoint)

    # --- what it says ---

    def next_ask(self, endpoint: str) -> Ask | None:
        """The next request to an agent; None: there is no reason for one."""
        agent = self.agents[endpoint]
        self._forget(agent)
        return agent.next_ask(self._clock(), past=self._is_past(endpoint))

    def target(self, served: Served, answering: Served) -> Target | None:
        """What to pull next; None: nothing.

        Args:
            served: by every engine.
            answering: the same of those that are there.
        """
        if self.run_id is None:
            return None
        # what those need that are there; and where they need nothing, what the others would
        lows = (lowest(each.values(), self.run_id) for each in (answering, served))
        return next((found for found in map(self._best, lows) if found is not None), None)

    def follows(self, version: Version) -> bool:
        """Whether that version's run is the one that is followed."""
        return self.run_id == version.run_id

    def check(self, claim: Claim) -> None:
        """Whether a claim may still come true.

        Raises:
            TransferAbortedError: another run took over from that one.
            NotPublishedError: its agent says that it has it not.
            VersionError: its agent never had that run, or publishes it anew.
        """
        if claim.error is not None:
            raise claim.error.with_traceback(None)
        if not claim.returns:
            self._runs_over.check(claim.version)

    def nobody_has(self, wanted: Target, *, since_s: float) -> NotPublishedError | None:
        """See `agent_state.nobody_has`."""
        return nobody_has(wanted, self.agents, since_s=since_s)

    def is_over(self, wanted: Target | None) -> bool:
        """Whether its trainer has ended in order, and nobody else has it."""
        return wanted is not None and self.nobody_has(wanted, since_s=0.0) is not None

    def is_sure_of(self, version: Version) -> bool:
        """Whether what is served under that name may be a success: nobody vouches for what was taken over before an
        agent, or a controller, has said so."""
        known = self._adoption
        return known is None or known.sure or known.version.run_id != version.run_id

    @property
    def wanted(self) -> Target | None:
        """The newest version that is known or claimed, whether it is there or not, and who is pulled from."""
        if self.run_id is None or self._current is None:
            return None
        numbers = [0, self._pulled]
        for endpoint, agent in self.agents.items():
            if agent.has(self.run_id) or endpoint == self._current:
                named = [agent.newest, agent.doubted, *(claim.version for claim in agent.claims)]
                numbers += [each.number for each in named if each is not None and each.run_id == self.run_id]
        return Target(version=Version(run_id=self.run_id, number=max(numbers)), endpoint=self._current)

    @property
    def errors(self) -> dict[str, str]:
        """Why agents could not be asked, by endpoint; without those that could, those that have ended in order, and
        those whose run another one took over from."""
        less = {who for who, agent in self.agents.items() if agent.has_ended or self._is_past(who)}
        return {who: agent.error for who, agent in self.agents.items() if agent.error is not None and who not in less}

    @property
    def ended(self) -> tuple[str, ...]:
        """Agents whose trainers have closed them in order; none beside one that is pulled from and answers."""
        if (current := self.agents.get(self._current or "")) is not None and current.error is None:
            return ()
        return tuple(who for who, agent in self.agents.items() if agent.has_ended)

    @property
    def doubts(self) -> str | None:
        """What was announced and is not there, or is there with other bytes; None where all is well."""
        if self.is_anew and self.run_id is not None:
            return published_anew(Version(run_id=self.run_id, number=self._pulled), self._pulled)
        for endpoint, agent in self.agents.items():
            for version in (agent.doubted, *agent.lacking):
                if version is not None and version.run_id not in self._runs_over:
                    return f"{version} was announced, and {endpoint} has it not: {agent.why}"
        return None

    # --- helpers ---

    def _is_past(self, endpoint: str) -> bool:
        current = self.agents.get(self._current or "")
        there = None if current is None or current.error is not None else current
        return endpoint != self._current and self.agents[endpoint].is_past(self._runs_over, there)

    def _follow(self, run_id: str, endpoint: str) -> None:
        self.run_id, self._current = run_id, endpoint
        self.count += 1
        number = 0 if (agent := self.agents.get(endpoint)) is None else agent.told_of(run_id)
        for each in self.agents.values():
            each.give_way(run_id, number, self._runs_over)
        if self._adoption is not None and self._adoption.version.run_id == run_id:
            self._pulled = self._adoption.version.number
            for agent in self.agents.values():
                for claim in agent.claims:
                    if is_in(claim.version, self._adoption.version):  # it seems to be served
                        claim.checked, claim.there_s = False, self._clock()

    def _take_up(self, endpoint: str, agent: AgentState, before: Version | None, newest: Version) -> None:
        """Whose word is it: a run that takes over was claimed of this agent, or comes after the one that it had."""
        over = newest.run_id in self._runs_over and not agent.is_to_bring_back(newest.run_id)
        if newest.run_id == self.run_id or over:
            return
        if self.run_id is None:
            self._follow(newest.run_id, endpoint)
            _logger.info("model %s: %s has %s", self._model_id, endpoint, newest)
            return
        had = before is not None and before.run_id == self.run_id
        if not had and not agent.is_said_to_have(newest.run_id):
            return
        _logger.info("model %s: run %s takes over from %s", self._model_id, newest.run_id, self.run_id)
        self._runs_over.take_over(self.run_id, newest.run_id)
        for each in self.agents.values():
            each.turn()
        self._pulled, self._loaded, self.is_anew, self._anew_since = -1, True, False, False
        self._incarnation, self._adoption = None, None
        self._follow(newest.run_id, endpoint)
        self._taken_over()

    def _judge(
        self,
        agent: AgentState,
        claim: Claim,
        answer: AgentVersion,
        newest: Version,
        before: Version | None,
        asked_s: float,
    ) -> None:
        """An agent that names a version says what it has not, too."""
        version = claim.version
        has = newest.number if newest.run_id == version.run_id else -1
        soon = answer.coming if answer.coming_run_id == version.run_id and answer.coming is not None else -1
        if has >= version.number:
            claim.there_s, agent.since_s = self._clock(), -math.inf  # it was named, so nobody waits for another agent
        over = max(has, soon) < 0 and before is not None and before.run_id == version.run_id
        late = asked_s >= claim.deniable_s or over or agent.knows_denied(version)
        if max(has, soon) >= version.number or not late:
            return
        _logger.warning(
            "model %s: %s was announced and is given up: %s has %s", self._model_id, version, claim.endpoint, newest
        )
        in_run = max(has, soon) >= 0
        if not over and (in_run or not claim.is_told):
            agent.doubt(version, self._clock())  # it may come late
        if in_run and (claim.is_told or over):
            agent.deny(version)
        claim.error = NotPublishedError(
            f"{claim.endpoint} did not have it: it has {newest}", version=str(version),
            newest=max(has, soon) if in_run else None,
        )  # fmt: skip

    def _check_life(self, claim: Claim, answer: AgentVersion, asked_s: float, *, ours: bool) -> None:
        """What seems to be served may be of an earlier life of the same run."""
        if asked_s < claim.began_s:
            return
        if self._is_another_life(answer) and answer.run_id in (None, claim.version.run_id):
            claim.error = VersionError(published_anew(claim.version, self._pulled), version=str(claim.version))
            _logger.warning("model %s: %s", self._model_id, claim.error)
            self.is_anew, self._anew_since = self.is_anew or ours, self._anew_since or ours
        else:
            claim.checked = True

    def _is_another_life(self, answer: AgentVersion) -> bool:
        return answer.incarnation not in (None, self._incarnation) and self._incarnation is not None

    def _judge_adoption(self, adoption: Adoption, answer: AgentVersion) -> None:
        verdict = adoption.judge(answer)
        if verdict is Verdict.ANEW:
            if not self.is_anew:
                _logger.warning("model %s: the run of %s is published anew", self._model_id, adoption.version)
            self._incarnation, self.is_anew, self._anew_since = ANOTHER_INCARNATION, True, True
        elif verdict is Verdict.OURS:
            self._incarnation, self._adoption = answer.incarnation, None
            self._settle(answer.incarnation)
        elif verdict is Verdict.UNPROVED and not adoption.sure:
            self._pulled, self._incarnation, self._adoption = -1, None, None
            self._settle(None)

    def _forget(self, agent: AgentState) -> None:
        """What is settled, and claims whose time is over."""
        now_s = self._clock()
        for claim in agent.claims:
            if claim.is_open and now_s >= claim.until_s:
                self._give_up(agent, claim)
        agent.claims = [claim for claim in agent.claims if claim.returns or claim.version.run_id not in self._runs_over]
        agent.forget(now_s)

    def _give_up(self, agent: AgentState, claim: Claim) -> None:
        """Its time is over. What is claimed of the run that is followed is waited for until its agent denies it; what
        its agent is about to have, too. Any other may come late: its agent is asked on for a while."""
        if not claim.checked:
            why = f"{claim.endpoint} does not say whether what is served is its own: {agent.why}"
        elif self.run_id not in (None, claim.version.run_id) and not is_in(claim.version, agent.coming):
            why = (
                f"run {claim.version.run_id} was not taken up: {claim.endpoint} did not have it within "
                f"{self._timeout_s:g} s: {agent.why}"
            )
            if agent.doubted is None:  # once, and not for each of many
                _logger.warning("model %s: %s", self._model_id, why)
            agent.doubt(claim.version, self._clock())
        else:
            return
        claim.error = VersionError(why, version=str(claim.version))

    def _best(self, low: int) -> Target | None:
        """What brings engines further that serve `low`. Who was pulled from goes first, as long as it answers: deltas
        build on what it has sent."""
        current = self.agents.get(self._current or "")
        stays = current is not None and current.has(self.run_id) and not current.struggles
        now_s = self._clock()
        found = [
            (agent.struggles, endpoint != self._current, -agent.newest.number, endpoint)
            for endpoint, agent in self.agents.items()
            if agent.newest is not None
            and agent.newest.run_id == self.run_id
            and agent.newest.number > low
            and (agent is current or not stays or now_s >= agent.since_s + self._patience_s)
        ]
        if self.run_id is None or not found:
            return None
        _, _, number, endpoint = min(found)
        return Target(version=Version(run_id=self.run_id, number=-number), endpoint=endpoint)

    def _look_at_others(self, endpoint: str) -> None:
        """They are asked what they have, those first that are known to have the run, and answered last; where a request
        waits at each, there is no need. None of them hurries: two that are dead would wake each other."""
        if self._poll_s is not None:
            return
        others = [(agent, name) for name, agent in self.agents.items() if name != endpoint]
        others.sort(key=lambda other: (not other[0].has(self.run_id), -other[0].asked_s, other[1]))
        for agent, _ in others[:_MAX_OTHERS]:
            agent.woken_s = self._clock()
