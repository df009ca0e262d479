"""A worker is told to switch its role: what an operator may ask for, and what becomes of requests meanwhile."""

import pytest

from gateway.administration import SwitchOrder, WorkerState
from gateway.backend import ConflictError, UnavailableError, UnknownWorkerError
from gateway.cluster import Cluster, ClusterSettings
from gateway.failover import RetryReason
from gateway.modes import Mode
from kvtransfer.messages import DecodeRequest, Goodbye, PrefillRequest, Refused, SwitchRole, Welcome
from kvtransfer.request_parts import EndReason
from kvtransfer.worker_facts import LeaveCause, Role
from tests.gateway.cluster_world import EPOCH, beat, hello, link, world
from tests.gateway.test_dispatch import in_loop

TO_PREFILL, TO_DECODE = SwitchOrder(Role.PREFILL), SwitchOrder(Role.DECODE)
FORCED = SwitchOrder(Role.PREFILL, 2.5, force=True)


def introduced(worker_id: str, role: Role, generation: str = "g1", **changes):
    """The Hello of a worker whose id names no role, and that can switch its own."""
    kv_endpoint = None if role is Role.PREFILL else "tcp://127.0.0.1:9"
    return hello(worker_id, generation, **{"role": role, "kv_endpoint": kv_endpoint, "can_switch": True, **changes})


async def join(it, *roles: Role) -> None:
    """node-0, node-1, ... with these roles."""
    for number, role in enumerate(roles):
        await it.hear(f"node-{number}", introduced(f"node-{number}", role))
        await it.hear(f"node-{number}", beat())


def states(it) -> list[tuple]:
    return [(report.worker_id, report.role, report.state) for report in it.dispatcher.administrator.workers()]


P, D = Role.PREFILL, Role.DECODE
READY, DRAINING, STALLED = WorkerState.READY, WorkerState.DRAINING, WorkerState.STALLED


@in_loop
async def test_a_worker_is_told_drains_and_comes_back_in_its_new_role():
    async with world() as it:
        await join(it, P, D, D)
        report = it.dispatcher.administrator.switch("node-1", SwitchOrder(P, 7.0))
        assert (report.state, report.role, report.switching_to) == (DRAINING, D, P)
        assert it.control.to("node-1", SwitchRole) == [SwitchRole(P, 7.0)]
        assert it.control.num_sent["node-1"] == 1, "numbered like all that must not be lost"
        await it.ask(prompt=(7,), mode=Mode.LOCAL)
        assert it.spec("node-2", DecodeRequest).prompt_token_ids == (7,), "nothing new goes there, before any beat"
        await it.hear("node-1", beat(progress=2))  # said before it has heard of it
        assert states(it)[1] == ("node-1", D, DRAINING)
        await it.hear("node-1", Goodbye("g1", "switching to prefill", LeaveCause.ROLE_SWITCH))
        await it.hear("node-1", introduced("node-1", P, "g2"))
        assert states(it) == [("node-0", P, READY), ("node-1", P, READY), ("node-2", D, READY)]
        assert it.dispatcher.administrator.workers()[1].switching_to is None


@in_loop
async def test_what_runs_on_it_goes_on_and_what_is_left_goes_elsewhere():
    async with world() as it:
        await join(it, P, D, D)
        client = await it.ask(prompt=(1, 2), max_tokens=6, mode=Mode.LOCAL)
        spec = it.spec("node-1", DecodeRequest)
        await it.reserve(spec, "node-1")
        await it.say("node-1", spec, 0, [10])
        it.dispatcher.administrator.switch("node-1", TO_PREFILL)
        await it.say("node-1", spec, 1, [11])
        await it.hear("node-1", Goodbye("g1", "switching to prefill", LeaveCause.ROLE_SWITCH))
        resumed = it.spec("node-2", DecodeRequest)
        assert (resumed.attempt, resumed.output_token_ids, client.tokens) == (1, (10, 11), [10, 11])
        await it.hear("node-1", introduced("node-1", P, "g2"))
        await it.say("node-1", spec, 2, [99], generation="g1")  # late words of the role that is over
        await it.say("node-2", resumed, 2, [12, 13, 14, 15], EndReason.LENGTH)
        assert (client.tokens, client.error) == ([10, 11, 12, 13, 14, 15], None)
        assert it.recorder.retries == [RetryReason.ROLE_SWITCHED], "nothing was lost"
        it.assert_empty()


@in_loop
async def test_the_prompt_of_a_long_request_goes_to_the_switched_worker():
    async with world() as it:
        await join(it, D, D)
        it.dispatcher.administrator.switch("node-1", TO_PREFILL)
        await it.hear("node-1", Goodbye("g1", "switching to prefill", LeaveCause.ROLE_SWITCH))
        await it.hear("node-1", introduced("node-1", P, "g2"))
        await it.ask(prompt=range(1, 100), mode=Mode.DISAGGREGATED)
        assert it.spec("node-1", PrefillRequest).prompt_token_ids == tuple(range(1, 100))
        assert it.control.to("node-1", DecodeRequest) == []


@in_loop
async def test_the_same_role_is_no_switch():
    async with world("prefill-0") as it:
        await join(it, D)
        report = it.dispatcher.administrator.switch("node-0", TO_DECODE)
        assert (report.state, report.switching_to) == (READY, None)
        assert it.dispatcher.administrator.switch("prefill-0", TO_PREFILL).state is READY
        assert it.control.to("node-0", SwitchRole) == it.control.to("prefill-0", SwitchRole) == []


@in_loop
async def test_what_is_refused_and_why():
    async with world("prefill-0", "decode-0", "decode-1") as it:
        switch = it.dispatcher.administrator.switch
        with pytest.raises(UnknownWorkerError):
            switch("decode-9", TO_PREFILL)
        with pytest.raises(ConflictError, match="role is fixed"):
            switch("decode-0", TO_PREFILL)
        with pytest.raises(ConflictError, match="role is fixed"):
            switch("decode-0", FORCED)
        await it.hear("decode-0", beat(progress=2, draining=True))
        with pytest.raises(ConflictError, match="drains"):
            switch("decode-0", TO_PREFILL)


@in_loop
async def test_a_switch_in_progress_is_not_joined_by_another():
    async with world() as it:
        await join(it, P, D, D)
        it.dispatcher.administrator.switch("node-1", TO_PREFILL)
        for order in (TO_PREFILL, TO_DECODE, FORCED):
            with pytest.raises(ConflictError, match="drains"):
                it.dispatcher.administrator.switch("node-1", order)
        assert len(it.control.to("node-1", SwitchRole)) == 1


@in_loop
async def test_the_last_of_a_role_goes_by_force_alone():
    async with world() as it:
        await join(it, P, D, D)
        it.dispatcher.administrator.switch("node-1", TO_PREFILL)
        with pytest.raises(ConflictError, match="no other decode worker can take requests; say force"):
            it.dispatcher.administrator.switch("node-2", TO_PREFILL)
        report = it.dispatcher.administrator.switch("node-2", FORCED)
        assert (report.state, report.switching_to) == (DRAINING, P)
        assert it.control.to("node-2", SwitchRole) == [SwitchRole(P, 2.5)]
        assert it.dispatcher.status().reasons == ("no decode worker can take requests",)


@in_loop
async def test_a_stalled_worker_is_nobody_to_fall_back_on():
    async with world(cluster=ClusterSettings(stalled_after_s=5.0, dead_after_s=1000.0)) as it:
        await join(it, P, D, D)
        it.clock.now += 6.0
        await it.hear("node-1", beat(progress=2))
        assert states(it)[1:] == [("node-1", D, READY), ("node-2", D, STALLED)]
        with pytest.raises(ConflictError, match="no other"):
            it.dispatcher.administrator.switch("node-1", TO_PREFILL)


@in_loop
async def test_an_order_that_does_not_go_out_changes_nothing():
    async with world() as it:
        await join(it, P, D, D)
        it.control.unreachable.add("node-1")
        with pytest.raises(UnavailableError):
            it.dispatcher.administrator.switch("node-1", TO_PREFILL)
        assert states(it)[1] == ("node-1", D, READY)


@in_loop
async def test_an_order_that_was_lost_is_forgotten_with_the_link():
    """The worker begins anew on the same start: it has not heard the order, and goes on in its role."""
    async with world() as it:
        await join(it, P, D, D)
        it.dispatcher.administrator.switch("node-1", TO_PREFILL)
        await it.hear("node-1", introduced("node-1", D, introduction=2))
        assert states(it)[1] == ("node-1", D, READY)


# --- the registry ------------------------------------------------------------------------------------


def registry(*hellos) -> Cluster:
    cluster = Cluster(EPOCH, ClusterSettings())
    for message in hellos:
        assert isinstance(tell(cluster, message).reply, Welcome)
    return cluster


def tell(cluster, message):
    return cluster.receive(link(message.worker_id, message.generation), message, 0.0)


def test_a_goodbye_that_was_lost_does_not_keep_a_switched_worker_out():
    cluster = registry(introduced("node-0", D))
    reaction = tell(cluster, introduced("node-0", P, "g2"))
    assert isinstance(reaction.reply, Welcome)
    assert reaction.departed.worker.ref == ("node-0", "g1")
    assert tell(cluster, introduced("node-0", D)).reply.reason.startswith("this start of worker node-0 is over")


@pytest.mark.parametrize(("can_first", "can_second"), [(False, True), (True, False), (False, False)])
def test_another_role_under_a_live_id_is_refused_to_who_can_not_switch(can_first, can_second):
    cluster = registry(introduced("node-0", D, can_switch=can_first))
    reply = tell(cluster, introduced("node-0", P, "g2", can_switch=can_second)).reply
    assert isinstance(reply, Refused)
    assert "belongs to a live decode worker" in reply.reason


@pytest.mark.parametrize("worker_id", ["decode-0", "decode"])
def test_an_id_that_names_a_role_is_not_for_who_can_switch(worker_id):
    reply = tell(registry(), introduced(worker_id, D)).reply
    assert isinstance(reply, Refused)
    assert "names a role" in reply.reason
