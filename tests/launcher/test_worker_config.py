"""The settings of a worker that can switch: each role gets its own, and what can't work in either is told at once."""

from dataclasses import fields

import pytest

from decode.config import DecodeConfig
from kvtransfer.command_line import parse
from kvtransfer.errors import SettingsError
from kvtransfer.worker_facts import Role
from launcher.worker_config import WorkerConfig
from prefill.config import PrefillConfig


def test_it_has_the_settings_of_both_roles_and_one_of_its_own():
    names = {field.name for field in fields(WorkerConfig)}
    assert names == {field.name for config in (PrefillConfig, DecodeConfig) for field in fields(config)} | {"role"}


def test_each_role_goes_by_its_own_settings():
    flags = ["--max-num-batched-tokens", "100", "--max-num-prefill-tokens", "30", "--max-num-seqs", "8"]
    config = parse(WorkerConfig, [*flags, "--kv-port", "7000", "--worker-id", "node-1"], {}, "worker", "")
    prefill, decode = config.as_prefill(), config.as_decode()
    assert (prefill.max_num_batched_tokens, decode.max_num_batched_tokens) == (100, 38)
    assert (config.most_batched_tokens, decode.kv_port) == (100, 7000)
    assert prefill.worker_id == decode.worker_id == config.own_id == "node-1"


def test_steps_of_decode_may_be_the_larger_ones():
    assert WorkerConfig(max_num_batched_tokens=16, max_num_prefill_tokens=256).most_batched_tokens == 320


def test_it_decodes_unless_told_otherwise_and_its_id_is_the_same_in_both_roles():
    config = WorkerConfig()
    assert config.first_role is Role.DECODE
    assert config.as_prefill().worker_id == config.as_decode().worker_id == config.own_id
    assert config.own_id.startswith("worker-")


def test_another_key_gives_another_name():
    config = WorkerConfig(curve_dir="/keys", curve_name="node-7")
    assert config.key_name == "node-7"
    assert config.own_id.startswith("node-7-")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"worker_id": "decode-0"}, "--worker-id=decode-0 is for a worker that is always decode"),
        ({"worker_id": "prefill"}, "is for a worker that is always prefill"),
        ({"curve_dir": "/keys", "curve_name": "decode-1", "worker_id": "decode-1"}, "always decode"),
        ({"curve_dir": "/keys", "curve_name": "decode-1", "worker_id": "node-0"}, "--curve-name=decode-1"),
        ({"role": "gateway"}, "--role"),
        ({"kv_host": "0.0.0.0"}, "--kv-host"),
        ({"kv_host": "0.0.0.0", "insecure": True}, "--kv-advertise-host"),
        ({"role": "prefill", "kv_host": "no host"}, "--kv-host"),
        ({"kv_link": "speed=1"}, "kv-link"),
    ],
)
def test_what_can_not_work_in_either_role_is_told_at_the_start(settings, message):
    with pytest.raises(SettingsError, match=message):
        WorkerConfig(**settings)
