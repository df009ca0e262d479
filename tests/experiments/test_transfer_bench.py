"""Every side of the transfer benchmark moves the bytes that it is timed for."""

import json
import threading

import pytest
import torch

from experiments import transfer_bench
from experiments.bare_ends import Copies
from experiments.transfer_bench import load_of
from experiments.transfer_ends import BenchError, wait_for_ends
from experiments.transfer_load import Load, LoadPool
from experiments.transfer_pair import Pair
from experiments.transfer_sides import OURS, SIDES
from kernels.reference import ReferenceKernels
from kvtransfer.incoming import ReceptionEnded, ReceptionOutcome
from kvtransfer.mailbox import Mailbox
from kvtransfer.worker_facts import KvLayout

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", block_size=4)
LOAD = Load(LAYOUT, tokens=10, requests=4)
TOGETHER = Load(LAYOUT, tokens=10, requests=4, together=2)


def pool_of(seed: int, fill: int | None = None) -> LoadPool:
    pool = LoadPool(LOAD, ReferenceKernels(), seed)
    if fill is not None:
        pool.fill(fill)
    return pool


def test_a_load_counts_its_bytes():
    assert (LOAD.frame_bytes, LOAD.num_messages, LOAD.num_bytes) == (640, 12, 15_360)
    assert len(list(LOAD.pieces())) == 12
    assert (TOGETHER.frame_bytes, TOGETHER.num_messages, TOGETHER.num_bytes) == (1280, 8, 15_360)
    assert [piece.num_layers for _, piece in TOGETHER.pieces()] == [2, 1] * 4
    assert sum(2 * TOGETHER.bytes_of(piece) for _, piece in TOGETHER.pieces()) == TOGETHER.num_bytes


def test_rounds_have_about_as_many_tokens_whatever_their_frames():
    assert [load_of(LAYOUT, tokens).requests for tokens in (1, 16, 512, 2048, 100_000)] == [512, 512, 16, 4, 1]
    assert [load_of(LAYOUT, tokens).together for tokens in (16, 4096, 100_000)] == [3, 2, 1]


def test_the_two_pools_lie_differently_and_a_checksum_tells_their_contents_apart():
    ours, theirs = pool_of(1, fill=3), pool_of(2, fill=3)
    assert ours.block_ids != theirs.block_ids
    assert ours.checksum() != theirs.checksum()
    assert ours.checksum() == pool_of(1, fill=3).checksum()


@pytest.mark.parametrize("load", [LOAD, TOGETHER], ids=["each layer alone", "layers together"])
@pytest.mark.parametrize("name", SIDES)
def test_each_side_moves_rounds_in_this_process(name, load):
    side, sent, received = SIDES[name], pool_of(1, fill=3), pool_of(2)
    receiving = side.receiving_end(load, received)
    sending = side.sending_end(load, sent, receiving.endpoint)
    for number in (1, 2):
        receiving.prepare(number)
        thread = threading.Thread(target=receiving.receive_round, args=(number,))
        thread.start()
        sending.send_round(number)
        thread.join(timeout=30)
        assert not thread.is_alive()
    sending.close()
    receiving.close()
    untouched = pool_of(2).checksum()
    assert (received.checksum() == sent.checksum()) == (side.copies is Copies.BOTH)
    assert (received.checksum() == untouched) == (side.copies is Copies.NONE)


def test_a_transfer_that_fails_spoils_the_round():
    events: Mailbox = Mailbox()
    events.put(ReceptionEnded(("r", 0), ReceptionOutcome.FAILED, reason="cut"))
    with pytest.raises(BenchError, match=r"ended as failed: cut"):
        wait_for_ends(events, 1, ReceptionOutcome.ARRIVED)
    events.close()


def test_pools_that_differ_after_a_round_are_seen():
    pool = pool_of(1, fill=3)
    pair = Pair(OURS, LOAD, pool)
    try:
        assert pair.run() > 0
        pair.check()
        pool.fill(4)
        with pytest.raises(BenchError, match="expected"):
            pair.check()
    finally:
        pair.close()


def test_a_whole_run_prints_a_table_a_size_and_writes_json(tmp_path, capsys):
    shape = ["--layers", "2", "--kv-heads", "2", "--head-dim", "8", "--dtype", "float32", "--block-size", "4"]
    before = torch.get_num_threads()
    try:
        options = ["--tokens", "8", "--rounds", "2", "--sides", "tcp, no copy", "--json", str(tmp_path / "out.json")]
        assert transfer_bench.main(shape + options) == 0
    finally:
        torch.set_num_threads(before)
    assert "| kvsplice " in capsys.readouterr().out
    (report,) = json.loads((tmp_path / "out.json").read_text())
    assert [figures["side"] for figures in report["figures"]] == [OURS, "tcp, no copy"]
    assert report["figures"][0]["ours"] == 1.0
    assert all(figures["gigabytes_per_second"] > 0 for figures in report["figures"])
