"""The load and its client against a server of the test's own making."""

import asyncio
import itertools
import json
import random
import time

import pytest

from experiments import mixed_load
from experiments.fresh_prompts import IdPrompts, TextPrompts, prompt_source
from experiments.mixed_traffic import Shape, Traffic
from experiments.stream_client import ServerError, StreamClient, open_client
from experiments.stream_record import Outcome
from tests.experiments.fake_server import FakeServer, count


def with_client(url, use):
    async def run():
        async with open_client(url, api_key=None) as http:
            return await use(StreamClient(http, "fake", ignore_eos=True))

    return asyncio.run(run())


def one_stream(server, max_tokens=5, patience=30.0, due=None):
    with server.running() as url:
        return with_client(
            url, lambda client: client.stream("a b", max_tokens, time.monotonic() + patience, due and due())
        )


def test_a_stream_is_recorded_chunk_by_chunk():
    server = FakeServer(gap=0.02)
    record = one_stream(server)
    assert record.outcome is Outcome.FINISHED
    assert (record.prompt_tokens, record.completion_tokens, record.tokens_per_chunk) == (4, 5, 1.0)
    assert len(record.chunk_times) == 5, "neither the empty chunk nor the usage"
    assert record.ttft >= 0.02
    assert len(record.gaps(0, time.monotonic())) == 4
    assert server.bodies[0]["ignore_eos"] is True


@pytest.mark.parametrize(
    ("server", "failure"),
    [
        (FakeServer(status=503), "HTTP 503"),
        (FakeServer(breaks_after=2), "broke off"),
        (FakeServer(error_after=2), "out of luck"),
    ],
    ids=["refused", "broken off", "error in the stream"],
)
def test_failures_are_recorded_with_their_cause(server, failure):
    record = one_stream(server)
    assert record.outcome is Outcome.FAILED
    assert failure in record.failure


def test_a_stream_is_cut_when_its_time_is_over():
    record = one_stream(FakeServer(gap=0.2), max_tokens=1000, patience=0.5)
    assert record.outcome is Outcome.CUT
    assert 1 <= len(record.chunk_times) <= 3
    assert record.failure == ""


def test_lateness_is_measured_against_the_schedule():
    assert one_stream(FakeServer(), due=lambda: time.monotonic() - 1.5).late_by == pytest.approx(1.5, abs=0.5)


def test_prompts_have_the_exact_length_if_the_server_tokenises():
    with FakeServer().running() as url:
        source = with_client(url, lambda client: prompt_source(client, random.Random(1), sample_words=10))
    assert isinstance(source, IdPrompts)
    first, second = source.take(50), source.take(50)
    assert len(first) == len(second) == 50
    assert first[:4] != second[:4]


def test_prompts_are_text_of_about_the_length_otherwise():
    with FakeServer(has_tokenize=False).running() as url:
        source = with_client(url, lambda client: prompt_source(client, random.Random(1), sample_words=10))
    assert isinstance(source, TextPrompts)
    assert count(source.take(50)) == 50
    assert source.take(50) != source.take(50)


def test_a_server_that_takes_no_prompt_is_an_error():
    with FakeServer(has_tokenize=False, status=500).running() as url, pytest.raises(ServerError, match="500"):
        with_client(url, lambda client: prompt_source(client, random.Random(1), sample_words=10))


def test_a_phase_keeps_its_streams_busy_and_sends_long_prompts_on_time():
    shape = Shape(streams=2, stream_output=4, long_tokens=30, long_output=2, long_every=0.3, settle=0.1)
    server = FakeServer()

    async def run(client):
        traffic = Traffic(client, IdPrompts(range(100), random.Random(1)), shape)
        return await traffic.phase(1.0, with_long_prompts=True), await traffic.phase(0.2, with_long_prompts=False)

    with server.running() as url:
        mixed, alone = with_client(url, run)
    assert len(mixed.streams) > 4
    assert {record.outcome for record in mixed.streams} <= {Outcome.FINISHED, Outcome.CUT}
    assert len(mixed.long_prompts) == 4, "at 0, 0.3, 0.6 and 0.9 s"
    assert mixed.long_prompts[0].prompt_tokens == 30
    assert mixed.loop_lags
    assert alone.long_prompts == ()
    long_bodies = [body for body in server.bodies if len(body["prompt"]) == 30]
    assert len({tuple(body["prompt"]) for body in long_bodies}) == 4, "each its own"


def test_prompts_on_the_idle_system_rest_as_long_as_those_under_load():
    shape = Shape(long_tokens=30, long_output=2, long_every=0.3)

    async def run(client):
        return await Traffic(client, IdPrompts(range(100), random.Random(1)), shape).idle(3)

    with FakeServer().running() as url:
        records = with_client(url, run)
    starts = [record.sent_at for record in records]
    assert all(later - sooner >= 0.25 for sooner, later in itertools.pairwise(starts))


RUN = ["--seconds", "0.5", "--warmup", "0.2", "--settle", "0.1", "--long-every", "0.2", "--long-tokens", "40"]
RUN += ["--stream-output", "16"]


def test_a_whole_run_prints_both_tables_and_writes_json(tmp_path, capsys):
    with FakeServer().running() as url:
        assert mixed_load.main(["--url", url, *RUN, "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr()
    assert "| ITL p99 ms" in printed.out
    assert "| TTFT p50 ms" in printed.out
    assert "open loop" in printed.out
    assert "not counted" in printed.err
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["idle"]["ends"]["finished"] == 12
    assert result["idle"]["prompt_tokens"] == [40]
    assert result["alone"]["tokens_per_chunk"] == 1.0
    assert result["mixed"]["itl"]["count"] > 20
    assert result["shape"]["long_every"] == 0.2


def test_failures_end_with_exit_code_1(capsys):
    with FakeServer(error_after=1).running() as url:
        assert mixed_load.main(["--url", url, *RUN]) == 1
    assert "FAILED: ServerError" in capsys.readouterr().out


def test_no_server_is_one_line(capsys):
    assert mixed_load.main(["--url", "http://127.0.0.1:9", *RUN]) == 1
    assert "cannot be measured" in capsys.readouterr().err


def test_nonsense_is_refused(capsys):
    with pytest.raises(SystemExit):
        mixed_load.main(["--url", "http://127.0.0.1:9", "--streams", "0"])
    assert "--streams must be above 0" in capsys.readouterr().err
