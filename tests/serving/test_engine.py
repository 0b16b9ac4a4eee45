"""Laws of the engine: who joins when, that nobody is changed by others, and that every place is given back."""

import time
from dataclasses import replace

import pytest
from serving_parts import Client, answers, ask, order

from decodescope.batching import forward_together
from decodescope.errors import InputError
from decodescope.options import RunOptions
from decodescope.serving.archive import Archive
from decodescope.serving.orders import Busy, Order, Plan
from decodescope.session import Session

TEXTS = ["a", "Hello there", "春天来了", "x" * 90, "1 + 1 =", "list", "the quick brown fox", "?"]


def position_bytes(session: Session) -> int:
    return session.run("a", max_new_tokens=1).run.kv_bytes_per_token


def idle(engine) -> dict[str, float]:
    """The gauges once nothing runs."""
    for _ in range(500):
        gauges = engine.gauges()
        if not gauges["requests_running"] and not gauges["requests_waiting"]:
            return gauges
        time.sleep(0.01)
    raise AssertionError(f"never idle: {gauges}")


def test_answers_together_are_those_alone_greedy_and_drawn(session, serve):
    engine = serve()
    for options in ({}, {"sampling": {"temperature": 1.0, "seed": 5}}):
        orders = [order(session, text, 12, **options) for text in TEXTS]
        singly = [answers(engine, [each])[0] for each in orders]
        assert answers(engine, orders) == singly


def test_an_answer_is_that_of_a_run_without_a_server(session, serve):
    (client,) = ask(serve(), order(session, "Hello there", 12))
    client.wait()
    assert client.ids == session.run("Hello there", max_new_tokens=12, ignore_eos=True).token_ids


def test_every_step_is_delivered_before_exactly_one_end(session, serve):
    clients = ask(serve(), *(order(session, text, 5) for text in TEXTS))
    for client in clients:
        end = client.wait()
        assert (end.finish_reason, end.new_tokens, len(client.steps)) == ("length", 5, 5)
        assert [step.step for step in client.steps] == list(range(5))
        assert end.text == "".join(step.delta_text for step in client.steps)


def test_requests_beyond_the_places_wait_their_turn(session, serve, diary):
    engine = serve(most_running=2)
    clients = ask(engine, *(order(session, text, 6) for text in TEXTS))
    for client in clients:
        client.wait()
    held, most = set(), 0
    for run_id, step, _ in diary.steps:
        held.add(run_id)
        most = max(most, len(held))
        held -= {run_id} if step.step == 5 else set()
    assert most == 2
    assert [run_id for run_id, *_ in diary.joins] == [client.ticket.run_id for client in clients]


def test_a_full_queue_says_busy_and_loses_nothing(session, serve, diary):
    engine = serve(most_running=1, most_waiting=2)
    clients = ask(engine, *(order(session, "a", 200) for _ in range(3)))
    with pytest.raises(Busy, match="busy"):
        engine.submit(order(session, "a"), Client())
    assert diary.refusals == ["queue_full"]
    for client in clients:
        assert client.wait().new_tokens == 200


def test_what_could_never_be_carried_out_is_refused_before_it_waits(session, serve, diary):
    room = 40 * position_bytes(session)
    engine = serve(cache_bytes=room)
    with pytest.raises(InputError, match="the cache holds 40"):
        engine.submit(order(session, "a", 100), Client())
    with pytest.raises(InputError, match="context"):
        prompt = session.prompt("a")
        engine.submit(Order(replace(prompt, tokens=prompt.tokens * 99), RunOptions()), Client())
    assert diary.refusals == ["too_large", "too_long"]
    assert engine.gauges()["requests_waiting"] == 0


def test_a_cancelled_request_gives_place_and_cache_back_before_the_next_pass(session, serve, diary):
    engine = serve(most_running=1)
    long, waiting = ask(engine, order(session, "a", 400), order(session, "b", 3))
    assert long.first.wait(30)
    engine.cancel(long.ticket)
    assert waiting.wait().finish_reason == "length"
    end = long.wait()
    assert end.finish_reason == "interrupted" and end.new_tokens < 400
    assert [reason for *_, reason in diary.ends] == ["abort", "length"]
    gauges = idle(engine)
    assert gauges["kv_cache_used_bytes"] == gauges["kv_cache_reserved_bytes"] == 0


def test_a_request_cancelled_in_the_queue_never_joins(session, serve, diary):
    engine = serve(most_running=1)
    running, waiting = ask(engine, order(session, "a", 100), order(session, "b", 100))
    engine.cancel(waiting.ticket)
    assert waiting.wait().finish_reason == "interrupted" and not waiting.steps
    running.wait()
    assert diary.refusals == ["abandoned"] and len(diary.joins) == 1


def test_requests_wait_until_their_whole_answers_have_room(session, serve, diary):
    room = 300 * position_bytes(session)
    engine = serve(cache_bytes=room)
    clients = ask(engine, *(order(session, text, 120) for text in ("a", "b", "c", "d")))
    most = 0.0
    while not all(client.over.is_set() for client in clients):
        gauges = engine.gauges()
        assert gauges["kv_cache_used_bytes"] <= gauges["kv_cache_capacity_bytes"] == room
        most = max(most, gauges["requests_running"])
        time.sleep(0.001)
    assert [client.wait().new_tokens for client in clients] == [120] * 4
    assert most == 2


def test_what_a_prompt_has_in_common_with_an_earlier_one_is_not_computed_again(session, serve, diary):
    engine = serve()
    text = "A long beginning that both of them have in common, "
    first, second = order(session, text + "one"), order(session, text + "two")
    alone = [answers(serve(), [each])[0] for each in (first, second)]
    assert [answers(engine, [each])[0] for each in (first, second)] == alone
    (_, _, none, _), (_, _, reused, _) = diary.joins[-2:]
    common = len(session.prompt(text, chat=False).ids)
    assert none == 0 and common <= reused < len(second.prompt.ids)


def test_a_prompt_that_is_known_shares_its_first_pass(session, serve, monkeypatch):
    engine, shared = serve(), []

    def watched(decodings):
        shared.append([each.next_pass() for each in decodings])
        forward_together(decodings)

    prompt = order(session, "The same as before.", 3)
    cold = answers(engine, [prompt])
    monkeypatch.setattr("decodescope.serving.engine.forward_together", watched)
    assert answers(engine, [prompt, prompt]) == cold * 2
    length = len(prompt.prompt.ids)
    assert any((length - 1, length) in passes for passes in shared)


def test_kept_prefixes_make_way_for_requests(session, serve, diary):
    room = 200 * position_bytes(session)
    engine = serve(cache_bytes=room)
    most = []

    class Looking:
        def stepped(self, run_id, step, seconds):
            reserved = engine.gauges()["kv_cache_reserved_bytes"]
            most.append(engine._prefixes.kept_bytes + reserved)

        joined = ended = refused = lambda *_: None

    engine._watchers.append(Looking())
    for number in range(12):
        answers(engine, [order(session, f"{number} the same " * (1 + number % 3), 60)])
    assert answers(engine, [order(session, "z", 150)])[0]
    assert len(most) == 12 * 60 + 150 and max(most) <= room
    engine.close()
    assert engine._prefixes.kept_bytes > 0


def test_a_prompt_that_fills_the_cache_finds_itself_again(session, serve, diary):
    prompt = session.prompt("x" * 100)
    engine = serve(cache_bytes=(len(prompt.ids) + 20) * position_bytes(session))
    first, second = (
        answers(engine, [Order(prompt, RunOptions(max_new_tokens=10, ignore_eos=True))]) for _ in range(2)
    )
    assert first == second
    assert [reused for _, _, reused, _ in diary.joins] == [0, len(prompt.ids) - 1]


def test_logits_that_are_no_numbers_end_their_request_and_no_other(session, serve, diary, tmp_path):
    broken = Session.open(str(session.files.path))
    engine = serve(of=broken)
    row = broken.model.model.embed_tokens.weight
    row.data[259] = float("nan")  # an id without a name: no text has it
    bad = Order(broken.prompt_of([1, 2, 259]), RunOptions(max_new_tokens=50, ignore_eos=True))
    good, failed = ask(engine, order(broken, "a", 30), bad)
    end = failed.wait()
    assert end.finish_reason == "error" and "NaN" in (end.error or "")
    assert good.wait().finish_reason == "length"
    assert sorted(reason for *_, reason in diary.ends) == ["length", "nonfinite"]


def test_a_client_that_cannot_be_reached_leaves_the_others_alone(session, serve):
    engine = serve()

    def gone(what):
        raise RuntimeError("the loop is closed")

    engine.submit(order(session, "a", 300), gone)
    (client,) = ask(engine, order(session, "b", 20))
    assert client.wait().new_tokens == 20
    assert idle(engine)["requests_running"] == 0


def test_a_fault_of_a_shared_pass_ends_those_in_it_and_the_engine_goes_on(session, serve, monkeypatch):
    engine = serve()

    def no_memory(decodings):
        raise MemoryError("planted")

    monkeypatch.setattr("decodescope.serving.engine.forward_together", no_memory)
    failed = ask(engine, order(session, "a"), order(session, "b"))
    assert {client.wait().finish_reason for client in failed} == {"error"}
    monkeypatch.undo()
    assert answers(engine, [order(session, "a", 4)])[0]
    assert engine.healthy


def test_closing_ends_what_runs_and_what_waits(session, serve):
    engine = serve(most_running=1)
    running, waiting = ask(engine, order(session, "a", 400), order(session, "b"))
    assert running.first.wait(30)
    engine.close()
    assert running.wait().finish_reason == waiting.wait().finish_reason == "interrupted"
    assert not engine.healthy
    with pytest.raises(Busy):
        engine.submit(order(session, "a"), Client())


def test_the_watcher_is_told_of_every_token_and_its_time(session, serve, diary):
    (client,) = ask(serve(), order(session, "a", 6))
    end = client.wait()
    assert [step for _, step, _ in diary.steps] == client.steps
    ((run_id, trace, seconds, reason),) = diary.ends
    assert (run_id, reason, trace.end) == (client.ticket.run_id, "length", end)
    waits = [wait for *_, wait in diary.steps]
    assert waits[0] >= end.ttft_s and sum(waits) <= seconds


@pytest.mark.parametrize(("given", "named"), [("cache_bytes", "--cache-bytes"), ("most_running", "--max-running")])
def test_a_plan_without_room_is_refused(given, named):
    with pytest.raises(InputError, match=f"{named} must be 1 or more"):
        Plan(**{"cache_bytes": 1, given: 0})


def test_several_orders_are_taken_all_or_none(session, serve, diary):
    engine = serve(most_running=1, most_waiting=2)
    three = [Client() for _ in range(3)]
    tickets = engine.submit_all([order(session, "a", 3)] * 3, three)
    assert [ticket.prompt_tokens for ticket in tickets] == [len(session.prompt("a").ids)] * 3
    for client in three:
        client.wait()
    idle(engine)
    with pytest.raises(InputError, match="more than the 3"):
        engine.submit_all([order(session, "a", 3)] * 4, [Client()] * 4)
    (long,) = ask(engine, order(session, "a", 400))
    assert long.first.wait(30)
    with pytest.raises(Busy):
        engine.submit_all([order(session, "a", 3)] * 3, [Client()] * 3)
    assert engine.gauges()["requests_waiting"] == 0
    assert diary.refusals == ["invalid", "queue_full"]
    engine.cancel(long.ticket)


def test_a_prefix_that_cannot_be_kept_costs_nobody_anything(session, serve, monkeypatch):
    engine = serve()

    def no_memory(past):
        raise MemoryError("planted")

    monkeypatch.setattr(engine._prefixes, "keep", no_memory)
    short, long = ask(engine, order(session, "a", 2), order(session, "b", 60))
    assert short.wait().finish_reason == long.wait().finish_reason == "length"
    assert engine.healthy


def test_a_request_that_cannot_join_ends_once_also_when_its_first_pass_fails(session, serve, diary, monkeypatch):
    engine = serve()
    monkeypatch.setattr("decodescope.serving.engine.forward_together", lambda _: 1 / 0)
    (running,) = ask(engine, order(session, "a", 5))
    running.wait()
    monkeypatch.setattr(Session, "join", lambda *_: 1 / 0)
    (failed,) = ask(engine, order(session, "b", 5))
    assert failed.wait().finish_reason == "error"
    idle(engine)
    assert len(failed.ends) == 1 and diary.refusals == ["failed"]


def test_a_watcher_that_fails_costs_nobody_anything(session, serve, diary):
    engine = serve()
    diary.stepped = diary.ended = lambda *_: 1 / 0
    assert len(answers(engine, [order(session, "a", 4)])[0]) == 4
    assert engine.healthy


def test_an_archive_that_fails_in_any_way_costs_nobody_anything(session, serve, tmp_path, monkeypatch):
    archive = Archive(tmp_path, "all", 1 << 30)
    for method in ("begin", "write", "settle"):
        monkeypatch.setattr(archive, method, lambda *_: 1 / 0)
    assert len(answers(serve(archive), [order(session, "a", 4)])[0]) == 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_whose_thread_is_gone_takes_no_orders(session, serve, monkeypatch):
    engine = serve()
    monkeypatch.setattr(engine, "_turn", lambda: exec("raise SystemExit"))
    ask(engine, order(session, "a"))
    engine._thread.join(30)
    assert not engine.healthy
    with pytest.raises(Busy):
        engine.submit(order(session, "b"), Client())
