"""One pool, and schedulers of both roles after each other: what a role leaves behind when it is told to go."""

import pytest

from engine.request import RequestState
from kvtransfer.outgoing import TransferOutcome
from kvtransfer.request_parts import EndReason
from tests.lifecycle.makers import Decode, Prefill, commands_of, outputs_of


def prefill_in_all_states() -> Prefill:
    """One request that is handed over, one that is computed, two that wait for room."""
    world = Prefill(num_blocks=8, share_prefixes=True, max_num_batched_tokens=12)
    world.add("hands-over", 12, gateway="one")
    world.step()
    world.add("runs", 16, prompt=range(60, 76), gateway="other")
    world.step()
    world.add("waits", 16, prompt=range(30, 46), gateway="one")
    world.add("waits-too", 4, prompt=range(50, 54), gateway="other", target=None)
    states = {request.spec.request_id: request.state for request in world.scheduler._requests.values()}
    assert states == {
        "hands-over": RequestState.HANDING_OVER,
        "runs": RequestState.RUNNING,
        "waits": RequestState.WAITING,
        "waits-too": RequestState.WAITING,
    }
    return world


def leave(world) -> None:
    """As `kvtransfer.worker` does, behind its Goodbye."""
    outputs_of(world), commands_of(world)
    for gateway in ("one", "other"):
        world.scheduler.cancel_all_of(gateway, 5.0)


def test_prefill_gives_all_blocks_back_once_nothing_reads_them():
    world = prefill_in_all_states()
    leave(world)
    assert {end for *_, end in outputs_of(world)} == {EndReason.CANCELLED}
    assert sorted(commands_of(world)) == [("AbortTransfer", "hands-over"), ("AbortTransfer", "runs")]
    assert len(world.scheduler) == 2, "their KV may still be read"
    for name in ("hands-over", "runs"):
        world.ended(name, TransferOutcome.ABORTED)
    world.check_all_is_empty()


def test_decode_gives_all_blocks_back_once_nothing_writes_them():
    world = Decode(num_blocks=8, share_prefixes=True)
    world.add("receives", 8, gateway="one")
    world.step()
    world.add("runs", 4, local=True, prompt=range(30, 34), gateway="other")
    world.step()
    world.add("waits", 40, local=True, prompt=range(50, 90), gateway="one")
    leave(world)
    assert commands_of(world) == [("CloseReception", "receives")]
    world.ended("receives")
    world.check_all_is_empty()


@pytest.mark.parametrize("local", [True, False])
def test_what_prefill_has_computed_is_found_by_decode_in_the_same_pool(local):
    before = Prefill(share_prefixes=True, max_num_batched_tokens=64)
    before.add("r", 14, target=None, max_tokens=1)
    before.step()
    before.check_all_is_empty()
    after = Decode(pool=before.pool, share_prefixes=True)
    job = after.add("q", 14, local=local)
    after.step()
    assert job.num_cached == 12, "three full blocks of four"


def test_what_decode_has_is_found_by_prefill_in_the_same_pool():
    before = Decode(share_prefixes=True)
    before.add("r", 14, local=True, max_tokens=1)
    before.step()
    before.step()
    before.check_all_is_empty()
    after = Prefill(pool=before.pool, share_prefixes=True)
    job = after.add("q", 14)
    after.step()
    assert job.num_cached == 12
