"""/admin over HTTP: who may call it, what it answers, and that nothing malformed reaches the cluster."""

import asyncio

import httpx
import pytest

from gateway.administration import SwitchOrder, WorkerReport, WorkerState
from gateway.app import create_app
from gateway.backend import ConflictError, UnavailableError, UnknownWorkerError
from gateway.config import GatewayConfig
from gateway.limits import HttpSettings
from gateway.metrics import Metrics
from kvtransfer.errors import SettingsError
from kvtransfer.worker_facts import Load, Role
from tests.gateway.http_world import ScriptedBackend, make_world, tokenizer_of_world

SWITCH = "/admin/workers/worker-0/role"
REPORT = WorkerReport("worker-0", Role.DECODE, WorkerState.DRAINING, Role.PREFILL, True, Load(2, 1, 0.25))
SHOWN = {
    "id": "worker-0",
    "role": "decode",
    "state": "draining",
    "switching_to": "prefill",
    "can_switch": True,
    "num_running": 2,
    "num_waiting": 1,
    "kv_usage": 0.25,
}


class FakeAdministration:
    def __init__(self, answer=REPORT) -> None:
        self.answer = answer
        self.orders: list = []

    def workers(self):
        return (REPORT,)

    def switch(self, worker_id, order):
        self.orders.append((worker_id, order))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def ask(method, path, admin=None, key=None, **settings_and_body) -> httpx.Response:
    body = {name: settings_and_body.pop(name) for name in ("json", "content") if name in settings_and_body}
    settings = HttpSettings(served_model_names=("tiny",), version="1", **settings_and_body)
    app = create_app(ScriptedBackend(), tokenizer_of_world(), settings, Metrics(), admin)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.request(method, path, headers=headers, **body)

    return asyncio.run(send())


def test_workers_are_listed():
    response = ask("GET", "/admin/workers", FakeAdministration())
    assert (response.status_code, response.json()) == (200, {"workers": [SHOWN]})


def test_a_switch_is_accepted_at_once():
    admin = FakeAdministration()
    response = ask("POST", SWITCH, admin, json={"role": "prefill"})
    assert (response.status_code, response.json()) == (202, SHOWN)
    ask("POST", SWITCH, admin, json={"role": "decode", "timeout_s": 0, "force": True})
    assert admin.orders == [
        ("worker-0", SwitchOrder(Role.PREFILL)),
        ("worker-0", SwitchOrder(Role.DECODE, 0.0, force=True)),
    ]


def test_nothing_to_do_is_a_200():
    report = WorkerReport("worker-0", Role.DECODE, WorkerState.READY, None, True, Load(0, 0, 0.0))
    response = ask("POST", SWITCH, FakeAdministration(report), json={"role": "decode"})
    assert (response.status_code, response.json()["state"]) == (200, "ready")


@pytest.mark.parametrize(
    ("error", "status"),
    [(UnknownWorkerError("no such"), 404), (ConflictError("not now"), 409), (UnavailableError("away"), 503)],
)
def test_what_the_cluster_refuses(error, status):
    response = ask("POST", SWITCH, FakeAdministration(error), json={"role": "prefill"})
    assert (response.status_code, response.json()["error"]["message"]) == (status, str(error))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"role": 1}',
        b'{"role": null}',
        b'{"role": "gateway"}',
        b'{"role": "PREFILL"}',
        b'{"role": "prefill", "timeout_s": -1}',
        b'{"role": "prefill", "timeout_s": 3601}',
        b'{"role": "prefill", "timeout_s": NaN}',
        b'{"role": "prefill", "timeout_s": 1e999}',
        b'{"role": "prefill", "timeout_s": "5"}',
        b'{"role": "prefill", "force": 1}',
        b'{"role": "prefill", "forse": true}',
        b'{"role": "' + b"x" * 10_000 + b'"}',
        b'{"role": "\\ud800"}',
    ],
)
def test_bad_orders_are_400_and_reach_nobody(body):
    admin = FakeAdministration()
    response = ask("POST", SWITCH, admin, content=body)
    assert (response.status_code, admin.orders) == (400, [])
    assert len(response.text) < 400


@pytest.mark.parametrize(("method", "path"), [("GET", "/admin/workers"), ("POST", SWITCH)])
def test_without_admin_there_is_no_such_path(method, path):
    assert ask(method, path, json={"role": "prefill"}).status_code == 404
    assert ask(method, path, json={"role": "prefill"}, api_key="k").status_code == 401
    assert ask(method, path, json={"role": "prefill"}, api_key="k", key="k").status_code == 404


@pytest.mark.parametrize(("method", "path"), [("DELETE", "/admin/workers"), ("GET", SWITCH)])
def test_wrong_methods_are_405(method, path):
    assert ask(method, path, FakeAdministration()).status_code == 405


@pytest.mark.parametrize(
    ("keys", "sent", "status"),
    [
        ({}, None, 202),
        ({"api_key": "a"}, None, 401),
        ({"api_key": "a"}, "b", 401),
        ({"api_key": "a"}, "a", 202),
        ({"admin_key": "b"}, None, 401),
        ({"admin_key": "b"}, "a", 401),
        ({"admin_key": "b"}, "b", 202),
        ({"api_key": "a", "admin_key": "b"}, None, 401),
        ({"api_key": "a", "admin_key": "b"}, "a", 403),
        ({"api_key": "a", "admin_key": "b"}, "b", 202),
    ],
)
def test_who_may_switch_a_worker(keys, sent, status):
    admin = FakeAdministration()
    response = ask("POST", SWITCH, admin, sent, json={"role": "prefill"}, **keys)
    assert (response.status_code, len(admin.orders)) == (status, int(status == 202))


@pytest.mark.parametrize(("sent", "status"), [("a", 200), ("b", 401), (None, 401)])
def test_the_admin_key_opens_nothing_else(sent, status):
    assert ask("GET", "/v1/models", FakeAdministration(), sent, api_key="a", admin_key="b").status_code == status


def test_an_admin_key_alone_closes_nothing_else():
    assert ask("GET", "/v1/models", FakeAdministration(), admin_key="b").status_code == 200


def test_operators_get_through_when_clients_are_turned_away():
    async def scenario():
        world = make_world(max_concurrent_requests=1)
        settings, admin = world.settings, FakeAdministration()
        app = create_app(ScriptedBackend(lambda *_: [60.0]), tokenizer_of_world(), settings, Metrics(), admin)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            busy = asyncio.create_task(client.post("/v1/completions", json={"model": "tiny", "prompt": "hello"}))
            await asyncio.sleep(0.2)
            assert (await client.get("/v1/models")).status_code == 429
            assert (await client.get("/admin/workers")).status_code == 200
            busy.cancel()

    asyncio.run(scenario())


def test_the_description_has_the_admin_paths_where_they_are():
    document = ask("GET", "/openapi.json", FakeAdministration()).json()
    post = document["paths"]["/admin/workers/{worker_id}/role"]["post"]
    assert [item["name"] for item in post["parameters"]] == ["worker_id"]
    assert "get" in document["paths"]["/admin/workers"]
    assert document["components"]["schemas"]["SwitchRoleRequest"]["required"] == ["role"]
    assert not any(path.startswith("/admin") for path in ask("GET", "/openapi.json").json()["paths"])


# --- settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "takes"),
    [({}, False), ({"enable_admin": True}, True), ({"admin_key": "b"}, True), ({"api_key": "a"}, False)],
)
def test_admin_calls_are_off_unless_asked_for(settings, takes):
    assert GatewayConfig(**settings).takes_admin_calls is takes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"api_key": "a", "admin_key": "a"}, "--admin-key is the same"),
        ({"enable_admin": True, "host": "0.0.0.0"}, "lets anybody there"),
    ],
)
def test_settings_that_would_let_anybody_in_are_refused(settings, message):
    with pytest.raises(SettingsError, match=message):
        GatewayConfig(**settings)


@pytest.mark.parametrize("keys", [{"api_key": "a"}, {"admin_key": "b"}])
def test_with_a_key_admin_calls_may_come_from_elsewhere(keys):
    assert GatewayConfig(enable_admin=True, host="0.0.0.0", **keys).takes_admin_calls


def test_keys_are_not_shown():
    assert "sesame" not in repr(GatewayConfig(admin_key="sesame"))


def test_an_empty_admin_key_is_refused():
    with pytest.raises(SettingsError, match="must not be empty"):
        HttpSettings(served_model_names=("tiny",), version="1", admin_key="")
