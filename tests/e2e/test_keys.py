"""Real processes with keys: they serve, they come back, and whoever has other keys or none stays outside."""

import shutil
from contextlib import contextmanager

import httpx
import pytest

from launcher.keys import make_keys
from tests.e2e.client import body_of, complete
from tests.e2e.cluster import DECODE, GATEWAY, PREFILL, ROLES, ClusterFlags, running_cluster
from tests.e2e.processes import RoleProcess, wait_until

PROMPT = [10, 11, 12, 13, 14]
TINY_WORKERS = ("--dtype", "float32", "--kv-cache-gib", "0.05")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The keys of one cluster, and one folder a role with what that role needs: `folder / ROLE`."""
    made = tmp_path_factory.mktemp("keys")
    make_keys([str(made / "all")])
    for role in ROLES:
        shutil.copytree(made / "all" / "public", made / role / "public")
        (made / role / "private").mkdir()
        shutil.copy(made / "all" / "private" / f"{role}.key_secret", made / role / "private")
    return made


@pytest.fixture(scope="module")
def secure(tiny_model, folder, tmp_path_factory):
    gateway, prefill, decode = (("--curve-dir", str(folder / role)) for role in ROLES)
    flags = ClusterFlags(tiny_model, TINY_WORKERS, gateway=gateway, prefill=prefill, decode=decode)
    with running_cluster(flags, tmp_path_factory.mktemp("secure")) as running:
        yield running


@contextmanager
def intruder(cluster, tiny_model, log, *flags):
    """A decode worker of another name, with these flags instead of the keys it should have."""
    control = f"tcp://127.0.0.1:{cluster._control_port}"
    own = ["--model", str(tiny_model), "--gateway", control, "--worker-id", "decode-1", *TINY_WORKERS, *flags]
    process = RoleProcess("intruder", DECODE, own, log)
    try:
        yield process
    finally:
        process.stop()


def is_served(cluster) -> bool:
    try:
        return cluster.http.post("/v1/completions", json=body_of(PROMPT, max_tokens=9)).status_code == 200
    except httpx.TransportError:
        return False


def test_requests_are_served_with_keys(secure):
    answers = [complete(secure.http, PROMPT, max_tokens=9, ignore_eos=True) for _ in range(3)]
    assert {answer.num_tokens for answer in answers} == {9}
    assert len({answer.text for answer in answers}) == 1
    secure.wait_pools_empty()


@pytest.mark.parametrize("role", [DECODE, PREFILL, GATEWAY])
def test_a_process_that_was_killed_comes_back_with_its_key(secure, role):
    secure.kill(role)
    secure.restart(role)
    wait_until(lambda: is_served(secure), within_s=60.0, what="requests are served again")
    secure.wait_pools_empty()


@pytest.mark.parametrize("kind", ["other keys", "no keys"])
def test_whoever_has_no_key_of_this_cluster_stays_outside(secure, tiny_model, tmp_path, kind):
    make_keys([str(tmp_path / "others")])
    flags = ("--curve-dir", str(tmp_path / "others")) if kind == "other keys" else ()
    with intruder(secure, tiny_model, tmp_path / "log", *flags) as process:
        wait_until(lambda: "can't be connected to" in process.output(), within_s=60.0, what="the intruder is told")
        assert complete(secure.http, PROMPT, max_tokens=9, ignore_eos=True).num_tokens == 9
        assert secure.gauge("worker_capable", worker="decode-1") is None
        assert process.exit_code is None
        assert process.output().count("can't be connected to") == 1


def test_a_worker_whose_id_is_not_its_keys_ends_before_it_loads_anything(tiny_model, folder, tmp_path):
    flags = ["--model", str(tiny_model), "--worker-id", "prefill-7", "--curve-dir", str(folder / DECODE)]
    process = RoleProcess("misnamed", DECODE, flags, tmp_path / "log")
    assert process.wait(60.0) == 2
    assert "--worker-id=prefill-7: the key of decode does not speak for it, that of prefill does" in process.output()
    assert "loaded" not in process.output()
