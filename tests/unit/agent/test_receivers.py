"""Who is registered with an agent, and what each has had: real pulls of a real agent."""

from __future__ import annotations

import contextlib

from tests.unit.agent.test_api import TOKEN, Beside
from weightsync.agent import receivers
from weightsync.agent.receivers import ReceiverBook
from weightsync.clients.agent import AgentClient
from weightsync.host.puller import Puller
from weightsync.types import Deadline
from weightsync.types.transfer_messages import RegisterRequest, Transport


def test_the_agent_says_who_has_what() -> None:
    beside = Beside()
    endpoint = beside.agent.endpoint
    with contextlib.ExitStack() as stack:
        stack.callback(beside.agent.close)
        client = AgentClient(endpoint, token=TOKEN)
        stack.callback(client.close)
        assert (client.receivers().receivers, client.receivers().num_registered) == ((), 0)
        segment = beside.publish(1)
        stack.callback(segment.close)
        while not client.get_version(wait_s=5.0).version:
            pass
        for name, transport in (("far", Transport.TCP), ("near", Transport.SHM)):
            puller = Puller(endpoint, "m", receiver_id=name, token=TOKEN, transport=transport)
            puller.pull(deadline=Deadline(20)).release()
            puller.close()
        client.register(RegisterRequest(receiver_id="idle"))
        while len([each for each in client.ended_transfers(wait_s=5.0).ended if each.ok]) < 2:
            pass
        book = client.receivers()
        by_name = {each.receiver_id: each for each in book.receivers}
        assert book.num_registered == 3
        assert {name: each.version for name, each in by_name.items()} == {"far": "run/1", "near": "run/1", "idle": None}
        assert by_name["far"].received_bytes == 40 * 7 * 4
        assert (by_name["far"].bytes_per_s or 0) > 0
        assert (by_name["near"].received_bytes, by_name["near"].bytes_per_s) == (0, None)
        assert by_name["far"].since_s <= by_name["far"].seen_s <= by_name["near"].seen_s
        client.register(RegisterRequest(receiver_id="far"))
        again = client.receivers().receivers[0]
        assert (again.receiver_id, again.version, again.since_s) == ("far", "run/1", by_name["far"].since_s)


def test_of_too_many_the_oldest_is_forgotten() -> None:
    book = ReceiverBook()
    for number in range(receivers._MAX_RECEIVERS + 2):
        book.register(str(number))
        book.register("0")
    assert "1" not in book
    assert "0" in book
    listed = book.listed(most=5)
    assert (len(listed.receivers), listed.num_registered) == (5, receivers._MAX_RECEIVERS)
