"""What is counted while a real model serves is what the traces of the same requests say."""

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving_parts import Client, ask

from decodescope.monitor.metrics import Metrics
from decodescope.monitor.series import ALL_SERIES, PREFIX
from decodescope.monitor.textfile import metrics_of
from decodescope.options import RunOptions
from decodescope.serving.archive import Archive
from decodescope.serving.engine import Engine
from decodescope.serving.orders import Order, Plan
from decodescope.session import Session
from decodescope.trace.records import Trace
from decodescope.trace.saved import read_trace

QUESTIONS = (
    "Name three rivers.",
    "What is a cache?",
    "one two three one two three one two",
    "Why is the sky blue?",
)
# So much to read that a first token takes tenths of a second, as do the buckets there. Before its pass a request also
# wakes the engine, copies what is known of its prompt and makes its run folder: some milliseconds each, some tens
# together, and all of it grows with the reading where the machine is busy.
READ = "All rivers run into the sea, yet the sea is not full. "
TEXTS = [f"{question} {READ * 5}" for question in QUESTIONS]
OPTIONS = RunOptions({"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 4}, max_new_tokens=16)
# Counted from the steps and ends alone; the others are latencies, or of the queue and the prefix cache.
EXACT = (
    "prompt_tokens_total", "generation_tokens_total", "request_success_total", "loops_detected_total",
    "nonfinite_logits_total", "guard_interventions_total", "entropy_nats", "chosen_probability", "margin_logits",
    "kept_mass", "repetition_ratio",
)  # fmt: skip
LATENCIES = ("time_to_first_token_seconds", "inter_token_latency_seconds")


def values(metrics: Metrics) -> dict[tuple[str, frozenset], float]:
    """Every sample by name and labels."""
    text, _ = metrics.exposition()
    samples = [sample for family in text_string_to_metric_families(text.decode()) for sample in family.samples]
    return {(each.name.removeprefix(PREFIX), frozenset(each.labels.items())): each.value for each in samples}


@pytest.fixture(scope="module")
def served(small_path, tmp_path_factory) -> Iterator[tuple[Metrics, list[Trace], list[dict]]]:
    """The metrics of requests, one after the other and then together; their traces; and how each one moved them."""
    session = Session.open(str(small_path), threads=1)  # several wait for each other where others work as well
    metrics = Metrics(session.files.name)
    archive = Archive(tmp_path_factory.mktemp("runs"), "all", 1 << 30)
    engine = Engine(session, Plan(cache_bytes=1 << 28), [metrics], archive)
    engine.start()
    traces, moved = [], []
    orders = [Order(session.prompt(text), OPTIONS) for text in TEXTS]
    for order in orders:
        before = values(metrics)
        traces.append(finished(ask(engine, order), archive)[0])
        moved.append({key: value - before.get(key, 0) for key, value in values(metrics).items()})
    traces += finished(ask(engine, *orders), archive)
    engine.close()
    yield metrics, traces, moved


def finished(clients: list[Client], archive: Archive) -> list[Trace]:
    for client in clients:
        client.wait()
    return [read_trace(archive.folder(client.ticket.run_id)) for client in clients]


def test_counts_are_those_of_the_traces_exactly_bucket_by_bucket(served):
    metrics, traces, _ = served
    counted, expected = values(metrics), values(metrics_of(traces))
    compared = 0
    for (name, labels), value in counted.items():
        if name.removesuffix("_bucket").removesuffix("_count") in EXACT:
            assert value == expected[name, labels], (name, labels)
            compared += 1
        elif name.removesuffix("_sum") in EXACT:
            assert value == pytest.approx(expected[name, labels], rel=1e-9)
    assert compared > 50
    assert sum(len(trace.path()) for trace in traces) == counted["generation_tokens_total", model_label(metrics)]


def model_label(metrics: Metrics) -> frozenset:
    return frozenset({("model_name", metrics._model)})


@pytest.mark.parametrize("name", LATENCIES)
def test_latencies_of_a_request_alone_are_those_of_its_trace_within_a_bucket(served, name):
    metrics, traces, moved = served
    (buckets,) = [series.buckets for series in ALL_SERIES if series.name == name]
    label, beyond = model_label(metrics), []
    for trace, each in zip(traces, moved, strict=False):
        count = each[f"{name}_count", label]
        mean = each[f"{name}_sum", label] / count
        steps = trace.path()[:1] if name == LATENCIES[0] else trace.path()[1:]
        assert count == len(steps)
        told = sum(step.timing.total_s for step in steps) / count
        assert mean >= told  # writing and telling are in the one alone
        beyond.append((mean - told) / width(buckets, told))
    assert sorted(beyond)[len(beyond) // 2] < 1, beyond


def width(buckets: tuple[float, ...], value: float) -> float:
    """Of the bucket that a value falls into."""
    upper = next(bound for bound in buckets if bound >= value)
    lower = max((bound for bound in buckets if bound < value), default=0.0)
    return upper - lower
