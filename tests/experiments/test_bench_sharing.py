"""Sharing figures: the arithmetic, what is demanded, and the client's reading of a stream."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest

from experiments.bench_sharing import main
from experiments.handoff_summary import series_total
from experiments.sharing_client import SharingClient
from experiments.sharing_summary import (
    ChoicePairs,
    PrefixPairs,
    SharingResult,
    choices_table,
    prefix_table,
    verdicts,
)
from experiments.stream_client import ServerError

FAST = PrefixPairs("local", fresh=(1.0, 1.1, 5.0), shared=(0.2, 0.1, 0.22), cached=1488)
SLOW = PrefixPairs("disaggregated", fresh=(1.0,), shared=(0.201,), cached=1488)
CHEAP = ChoicePairs("disaggregated", 8, one=(1.0, 3.0, 1.2), many=(1.3, 1.3, 1.4), one_bytes=100.0, many_bytes=101.0)
DEAR = ChoicePairs("disaggregated", 8, one=(1.0,), many=(1.3,), one_bytes=100.0, many_bytes=800.0)
UNSENT = ChoicePairs("local", 8, one=(1.0,), many=(1.1,), one_bytes=None, many_bytes=None)


def test_ratios_are_of_medians():
    assert FAST.speedup == pytest.approx(1.1 / 0.2)
    assert CHEAP.time_cost == pytest.approx(1.3 / 1.2)
    assert CHEAP.byte_cost == pytest.approx(1.01)
    assert UNSENT.byte_cost is None


def test_what_is_demanded_is_told():
    met = verdicts(SharingResult((FAST,), (CHEAP, UNSENT)))
    assert [is_met for is_met, _ in met] == [True] * 4
    assert met[0][1] == "local: cached TTFT 5.5x sooner, demanded >= 5x: met"
    assert [is_met for is_met, _ in verdicts(SharingResult((SLOW,), (DEAR,)))] == [False] * 3
    assert verdicts(SharingResult((FAST,), (), "HTTP 400"))[1] == (False, "several choices NOT MEASURED: HTTP 400")


def test_tables_have_a_row_a_mode():
    assert [line.split("|")[1].strip() for line in prefix_table((SLOW, FAST)).splitlines()[2:]] == [
        "disaggregated",
        "local",
    ]
    rows = choices_table((CHEAP, UNSENT)).splitlines()
    assert [cell.strip() for cell in rows[3].split("|")[1:-1]] == ["local", "1000.0", "1100.0", "1.10", "-", "-", "-"]


def test_a_series_of_some_labels():
    text = 'a_total{role="prefill",worker="p"} 3.0\na_total{role="decode",worker="d"} 4.0\na_total_more 9\n'
    assert series_total(text, "a_total") == 7.0
    assert series_total(text, "a_total", 'role="prefill"') == 3.0
    assert series_total(text, "b_total") is None


def event(index, text):
    return f"data: {json.dumps({'choices': [{'index': index, 'text': text}], 'usage': None})}\n\n"


USAGE = 'data: {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 5}}}\n\ndata: [DONE]\n\n'


@asynccontextmanager
async def answering(status, text):
    seen = []

    def answer(request):
        seen.append(request)
        return httpx.Response(status, text=text)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server") as http:
        yield SharingClient(http, "model", "local"), seen


def ask(status, text, choices):
    async def run():
        async with answering(status, text) as (client, seen):
            return await client.ask([1, 2], choices), seen[0]

    return asyncio.run(run())


def test_each_choice_is_followed():
    shared, request = ask(200, event(0, "a") + event(1, "b") + event(0, "") + event(0, "c") + event(1, "d") + USAGE, 2)
    assert 0 < shared.ttft < shared.all_second
    assert shared.cached == 5
    assert request.headers["X-KVSplice-Mode"] == "local"
    assert b'"n":2' in request.content.replace(b" ", b"")


@pytest.mark.parametrize(
    ("status", "text", "says"),
    [
        (400, "n: not supported", "HTTP 400: n: not supported"),
        (200, 'data: {"error": {"message": "gone"}}\n\n', "error in the stream"),
        (200, event(0, "a") + event(0, "b") + event(1, "a") + USAGE, "less than two pieces"),
    ],
)
def test_what_is_no_answer(status, text, says):
    with pytest.raises(ServerError, match=says):
        ask(status, text, 2)


def test_no_server_no_figures(capsys):
    assert main(["--url", "http://127.0.0.1:9"]) == 1
    assert "cannot be measured" in capsys.readouterr().err


def test_a_prefix_is_less_than_the_prompt(capsys):
    with pytest.raises(SystemExit):
        main(["--prompt-tokens", "10", "--prefix-tokens", "10"])
    assert "--prefix-tokens must be less" in capsys.readouterr().err
