"""The command lines of the children are what the roles' own parsers accept."""

import os
from pathlib import Path

import pytest

from decode.config import DecodeConfig
from gateway.config import GatewayConfig
from kvtransfer.command_line import parse
from launcher.config import ServeConfig
from launcher.plan import Machine, plan, served_names
from launcher.supervisor import PATIENCE_S
from launcher.worker_config import WorkerConfig
from prefill.config import PrefillConfig

CLASSES = {"gateway": GatewayConfig, "prefill": PrefillConfig, "decode": DecodeConfig, "worker": WorkerConfig}
MODEL = Path("/models/tiny")


def planned(config=None, *, cores=8, gpus=(), environ=None):
    """name -> (the config that the child will see, its environment)"""
    machine = Machine(cores=tuple(range(cores)), gpus=gpus, http_port=8123, control_port=9123)
    children = {}
    for child in plan(config or ServeConfig(), MODEL, machine, environ or {}):
        assert child.command[2:4] == ("-m", "launcher.child")
        role = child.command[4]
        parsed = parse(CLASSES[role], child.command[5:], child.environ, "child", "")
        children[child.name] = (parsed, child.environ)
    return children


def test_defaults():
    children = planned()
    assert list(children) == ["gateway", "prefill-0", "decode-0"]
    gateway, prefill, decode = (config for config, _ in children.values())
    assert (gateway.port, gateway.control_port, gateway.control_host) == (8123, 9123, "127.0.0.1")
    assert gateway.served_names == ("smollm2-135m",)
    assert prefill.gateway == decode.gateway == ("tcp://127.0.0.1:9123",)
    assert {config.model for config in (gateway, prefill, decode)} == {"/models/tiny"}
    assert prefill.cpu_threads == decode.cpu_threads == 4
    assert (prefill.worker_id, decode.worker_id) == ("prefill-0", "decode-0")
    assert gateway.shutdown_timeout_s < prefill.shutdown_timeout_s == decode.shutdown_timeout_s < PATIENCE_S - 1.0


def test_settings_are_passed_on():
    config = ServeConfig(
        prefill=2,
        decode=3,
        dtype="float32",
        max_model_len=100,
        max_num_batched_tokens=64,
        max_num_seqs=5,
        block_size=32,
        kv_cache_gib=0.25,
        default_seed=-7,
        host="0.0.0.0",
        log_level="debug",
        cpu_threads=1,
        served_model_name=("a", "b"),
    )
    children = planned(config, cores=1)
    assert list(children) == ["gateway", "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    gateway = children["gateway"][0]
    assert (gateway.host, gateway.default_seed, gateway.served_names) == ("0.0.0.0", -7, ("a", "b"))
    for name in list(children)[1:]:
        worker = children[name][0]
        assert (worker.dtype, worker.max_model_len, worker.max_num_seqs) == ("float32", 100, 5)
        assert (worker.block_size, worker.kv_cache_gib, worker.cpu_threads) == (32, 0.25, 1)
        assert worker.log_level == "debug"
    assert children["prefill-1"][0].max_num_batched_tokens == 64


def test_the_environment_cannot_break_the_plan():
    """Variables meant for a role alone on its node lose against what the launcher needs; others go through."""
    environ = {
        "KVSPLICE_KV_PORT": "7000",
        "KVSPLICE_KV_HOST": "10.0.0.1",
        "KVSPLICE_KV_ADVERTISE_HOST": "10.0.0.1",
        "KVSPLICE_CONTROL_PORT": "7001",
        "KVSPLICE_CONTROL_HOST": "10.0.0.1",
        "KVSPLICE_GATEWAY": "tcp://10.0.0.1:1",
        "KVSPLICE_WORKER_ID": "same",
        "KVSPLICE_LEASE_S": "12",
        "KVSPLICE_DEAD_AFTER_S": "1.5",
    }
    children = planned(ServeConfig(decode=2), environ=environ)
    for name in ("decode-0", "decode-1"):
        decode = children[name][0]
        assert (decode.kv_port, decode.kv_dial_host, decode.worker_id, decode.lease_s) == (0, "127.0.0.1", name, 12.0)
        assert decode.gateway == ("tcp://127.0.0.1:9123",)
    assert children["gateway"][0].control_port == 9123
    assert children["gateway"][0].dead_after_s == 1.5


def test_keys_go_to_every_process_each_of_which_takes_that_of_its_role():
    environ = {"KVSPLICE_CURVE_NAME": "decode-7"}
    children = [config for config, _ in planned(ServeConfig(curve_dir="/keys", decode=2), environ=environ).values()]
    assert {config.curve_dir for config in children} == {"/keys"}
    assert [config.curve_name for config in children[1:]] == ["prefill", "decode", "decode"]
    assert {config.curve_dir for config, _ in planned().values()} == {None}


@pytest.mark.parametrize("name", ["api_key", "admin_key"])
def test_the_key_is_in_no_command_line(name):
    config = ServeConfig(**{name: "open-sesame"})
    machine = Machine(cores=(0,), gpus=(), http_port=1, control_port=2)
    variable = f"KVSPLICE_{name.upper()}"
    children = plan(config, MODEL, machine, {variable: "open-sesame"})
    assert not any("open-sesame" in word for child in children for word in child.command)
    assert [child.environ.get(variable) for child in children] == ["open-sesame", None, None]


@pytest.mark.parametrize("admin", [{"enable_admin": True}, {"admin_key": "b"}])
def test_where_admin_calls_are_on_workers_can_switch(admin):
    config = ServeConfig(prefill=1, decode=2, max_num_batched_tokens=64, max_num_prefill_tokens=32, **admin)
    children = planned(config)
    assert list(children) == ["gateway", "worker-0", "worker-1", "worker-2"]
    assert children["gateway"][0].takes_admin_calls
    workers = [worker for worker, _ in list(children.values())[1:]]
    assert [(worker.role, worker.own_id) for worker in workers] == [
        ("prefill", "worker-0"),
        ("decode", "worker-1"),
        ("decode", "worker-2"),
    ]
    for worker in workers:
        assert (worker.kv_host, worker.kv_port, worker.kv_advertise_host) == ("127.0.0.1", 0, "127.0.0.1")
        assert (worker.as_prefill().max_num_batched_tokens, worker.as_decode().max_num_prefill_tokens) == (64, 32)
    with_keys = planned(ServeConfig(curve_dir="/keys", **admin))
    assert {worker.key_name for worker, _ in list(with_keys.values())[1:]} == {"worker"}


def test_workers_that_can_switch_may_all_begin_with_decode():
    children = planned(ServeConfig(prefill=0, decode=2, enable_admin=True, kv_checksum=True))
    assert [worker.role for worker, _ in list(children.values())[1:]] == ["decode", "decode"]
    assert children["gateway"][0].default_mode == "auto", "a prompt may go to prefill, once somebody prefills"


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ((), [None, None, None]),
        (("0", "1", "2", "3"), [("0", 0.9), ("1", 0.9), ("2", 0.9)]),
        (("4", "5"), [("4", 0.45), ("5", 0.9), ("4", 0.45)]),
        (("0",), [("0", pytest.approx(0.3))] * 3),
    ],
)
def test_gpus_are_dealt_out_in_turn(gpus, expected):
    children = planned(ServeConfig(decode=2), gpus=gpus)
    found = [
        (environ["CUDA_VISIBLE_DEVICES"], worker.gpu_memory_utilization) if "CUDA_VISIBLE_DEVICES" in environ else None
        for worker, environ in list(children.values())[1:]
    ]
    assert found == expected


def test_served_names_follow_the_model(tmp_path):
    assert served_names(ServeConfig(model=str(tmp_path))) == (tmp_path.name,)
    assert served_names(ServeConfig(model="org/name")) == ("org/name",)


def test_the_callers_environment_is_untouched():
    before = dict(os.environ)
    planned(ServeConfig(api_key="k"), gpus=("0",), environ=os.environ)
    assert dict(os.environ) == before


def test_where_prompts_are_computed_is_passed_on():
    gateway = planned()["gateway"][0]
    assert (gateway.default_mode, gateway.local_prefill_threshold) == ("auto", 64)
    config = ServeConfig(default_mode="disaggregated", local_prefill_threshold=5)
    gateway = planned(config)["gateway"][0]
    assert (gateway.default_mode, gateway.local_prefill_threshold) == ("disaggregated", 5)


@pytest.mark.parametrize("default_mode", ["auto", "local"])
def test_without_prefill_workers_all_is_local(default_mode):
    children = planned(ServeConfig(prefill=0, decode=2, default_mode=default_mode))
    assert list(children) == ["gateway", "decode-0", "decode-1"]
    assert children["gateway"][0].default_mode == "local"
    assert children["decode-0"][0].cpu_threads == 4


@pytest.mark.parametrize(
    ("settings", "cores", "expected"),
    [
        ({}, (0, 1), {"gateway": {0}, "prefill-0": {1}, "decode-0": {0}}),
        ({}, (2, 5, 7), {"gateway": {2, 5}, "prefill-0": {7}, "decode-0": {2, 5}}),
        ({}, range(8), {"gateway": {0, 1, 2, 3}, "prefill-0": {4, 5, 6, 7}, "decode-0": {0, 1, 2, 3}}),
        (
            {"prefill": 2, "cpu_threads": 1},
            range(4),
            {"gateway": {0, 1}, "prefill-0": {2}, "prefill-1": {3}, "decode-0": {0, 1}},
        ),
        ({"decode": 2, "prefill": 0}, range(4), {"gateway": None, "decode-0": None, "decode-1": None}),
        ({"cpu_threads": 2}, range(3), {"gateway": None, "prefill-0": None, "decode-0": None}),
        ({}, (0,), {"gateway": None, "prefill-0": None, "decode-0": None}),
        ({"reserve_cores": False}, (0, 1), {"gateway": None, "prefill-0": None, "decode-0": None}),
    ],
)
def test_prefill_workers_have_cores_of_their_own(settings, cores, expected):
    machine = Machine(cores=tuple(cores), gpus=(), http_port=1, control_port=2)
    children = plan(ServeConfig(**settings), MODEL, machine, {})
    assert {child.name: child.cores for child in children} == expected


def test_where_gpus_compute_all_cores_are_for_all():
    machine = Machine(cores=(0, 1), gpus=("0",), http_port=1, control_port=2)
    assert {child.cores for child in plan(ServeConfig(), MODEL, machine, {})} == {None}
