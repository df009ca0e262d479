"""X-KVSplice-Mode in calls and answers, and in what /health and /metrics say."""

import pytest

from gateway.backend import RequestFailedError
from gateway.metrics import Metrics
from gateway.modes import Mode
from gateway.observer import Phases, RequestOutcome
from kvtransfer.request_parts import EndReason
from tests.gateway.http_world import ScriptedBackend, events_of, make_world
from tests.gateway.test_metrics import values_of

HEADER = "X-KVSplice-Mode"
CALLS = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


def call(world, path="/v1/completions", headers=None, **fields):
    return world.post(path, {"model": "tiny", **CALLS[path], **fields}, headers=headers or {})


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", ["auto", "local", "disaggregated", " LOCAL "])
def test_the_mode_asked_for_goes_to_the_backend_and_the_one_it_got_comes_back(path, stream, value):
    world = make_world(ScriptedBackend(goes=Mode.DISAGGREGATED))
    response = call(world, path, {HEADER: value}, stream=stream)
    assert response.status_code == 200
    assert [traits.mode for traits in world.backend.traits] == [Mode(value.strip().lower())]
    assert response.headers.get_list(HEADER) == ["disaggregated"]


def test_without_the_header_the_gateway_chooses():
    world = make_world(ScriptedBackend(goes=Mode.LOCAL))
    response = call(world, prompt=["hello", "you"])
    assert [traits.mode for traits in world.backend.traits] == [None, None]
    assert response.headers[HEADER] == "local"


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("headers", [{HEADER: ""}, {HEADER: "remote"}, [(HEADER, "local"), (HEADER, "auto")]])
def test_what_is_no_mode_is_a_400(path, headers):
    world = make_world()
    response = call(world, path, headers)
    error = response.json()["error"]
    assert (response.status_code, error["type"], world.backend.traits) == (400, "invalid_request_error", [])
    assert error["param"] == HEADER.lower()


def test_an_unknown_mode_is_not_echoed_whole():
    response = call(make_world(), headers={HEADER: "x" * 5000})
    assert response.status_code == 400
    assert len(response.text) < 500


def test_a_call_that_fails_first_names_no_mode():
    """An error is an answer of its own, whichever workers had the request."""
    world = make_world(ScriptedBackend(script=lambda *_: [RequestFailedError("lost")], goes=Mode.LOCAL))
    response = call(world, stream=True)
    assert (response.status_code, HEADER in response.headers) == (502, False)


def test_a_mode_that_is_not_possible_now_is_a_503():
    world = make_world(ScriptedBackend(impossible=(Mode.DISAGGREGATED,), goes=Mode.LOCAL))
    assert call(world, headers={HEADER: "disaggregated"}).status_code == 503
    assert call(world, headers={HEADER: "local"}).status_code == 200


def test_health_tells_of_one_mode():
    world = make_world(ScriptedBackend(impossible=(Mode.DISAGGREGATED,)))
    statuses = {
        mode: world.ask("GET", f"/health?mode={mode}").status_code for mode in ("auto", "local", "disaggregated")
    }
    assert statuses == {"auto": 200, "local": 200, "disaggregated": 503}
    assert world.ask("GET", "/health").status_code == 200


@pytest.mark.parametrize("query", ["mode=remote", "mode=", "mode=local&mode=auto", "mode=local&mode=x"])
def test_health_of_no_mode_or_of_two_is_a_400(query):
    error = make_world().ask("GET", f"/health?{query}")
    assert (error.status_code, error.json()["error"]["param"]) == (400, "mode")


def test_a_stream_has_its_mode_in_its_head():
    world = make_world(ScriptedBackend(goes=Mode.LOCAL))
    response = call(world, stream=True)
    assert response.headers[HEADER] == "local"
    assert events_of(response)[-1] == "[DONE]"


def test_requests_are_counted_by_mode():
    metrics = Metrics()
    for mode in (Mode.LOCAL, Mode.LOCAL, Mode.DISAGGREGATED):
        metrics.on_request_end(RequestOutcome("r", EndReason.STOP, None, Phases(dispatch_s=0.0), mode=mode))
    values = values_of(metrics)
    assert values['kvsplice:request_mode_total{mode="local"}'] == 2
    assert values['kvsplice:request_mode_total{mode="disaggregated"}'] == 1
