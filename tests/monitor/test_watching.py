"""Look after look: windows, restarts, and alerts that hold long enough."""

from exposed import growing, sends, served, vllm

from decodescope.errors import InputError
from decodescope.monitor.alerts import ALERTS
from decodescope.monitor.scrape import address_of, read
from decodescope.monitor.series import PREFIX
from decodescope.monitor.watching import UNTOLD, WINDOW_S, Watch, readings, second_look

HOLD_S = {each.key: each.hold_s for each in ALERTS}


def watch() -> Watch:
    return Watch(address_of("h:1"))


def own(**values: float) -> str:
    return "".join(f'{PREFIX}{name}{{model_name="m"}} {value}\n' for name, value in values.items())


def states(reading) -> dict[str, str]:
    return {raised.key: raised.state for raised in reading.alerts}


def test_rates_are_of_the_last_step_and_quantiles_of_the_window():
    watched = watch()
    watched.see(read(vllm(100, 10), 0.0, "h"))
    watched.see(read(vllm(200, 10), 10.0, "h"))
    reading = watched.see(read(vllm(220, 10), 12.0, "h"))
    assert (reading.step_s, reading.window_s) == (2.0, 12.0)
    assert reading.figures.tokens_per_s == 10


def test_the_window_does_not_grow_beyond_its_length():
    watched = watch()
    for at in range(0, 600, 10):
        reading = watched.see(read(vllm(100 + at), float(at), "h"))
        assert reading.window_s <= WINDOW_S
    assert reading.window_s == WINDOW_S


def test_looks_that_are_far_apart_are_compared_all_the_same():
    watched = watch()
    watched.see(read(vllm(100), 0.0, "h"))
    assert watched.see(read(vllm(400), 300.0, "h")).figures.tokens_per_s == 1


def test_a_server_that_was_started_anew_begins_a_new_stretch():
    watched = watch()
    watched.see(read(vllm(1000), 0.0, "h"))
    reading = watched.see(read(vllm(10), 2.0, "h"))
    assert reading.window_s == 0 and reading.figures.tokens_per_s is None
    assert watched.see(read(vllm(30), 4.0, "h")).figures.tokens_per_s == 10


def test_an_alert_is_pending_until_it_has_held_and_over_when_it_no_longer_holds():
    watched, hold = watch(), HOLD_S["kv_cache_full"]
    assert states(watched.see(read(vllm(1), 0.0, "h"))) == {"kv_cache_full": "pending"}
    assert states(watched.see(read(vllm(2), hold - 1, "h"))) == {"kv_cache_full": "pending"}
    reading = watched.see(read(vllm(3), hold, "h"))
    assert states(reading) == {"kv_cache_full": "firing"}
    assert (reading.alerts[0].measured, reading.alerts[0].limit) == (0.97, 0.9)
    eased = vllm(4).replace("0.97", "0.5")
    assert states(watched.see(read(eased, hold + 1, "h"))) == {}
    assert states(watched.see(read(vllm(5), hold + 2, "h"))) == {"kv_cache_full": "pending"}


def test_each_condition_is_told_by_its_own_figures():
    def at(**changes: float) -> str:
        base = dict(
            generation_tokens_total=0, entropy_nats_sum=0, entropy_nats_count=0, repetition_ratio_sum=0,
            repetition_ratio_count=0, time_to_first_token_seconds_count=0, loops_detected_total=0,
            nonfinite_logits_total=0, process_resident_bytes=1, machine_memory_bytes=100,
        )  # fmt: skip
        return own(**{**base, **changes})

    def after(**changes: float) -> dict[str, str]:
        watched = watch()
        watched.see(read(at(), 0.0, "h"))
        return states(watched.see(read(at(**changes), 1.0, "h")))

    assert after() == {}
    assert after(nonfinite_logits_total=1) == {"nonfinite": "firing"}
    assert after(entropy_nats_sum=600, entropy_nats_count=100) == {"entropy_explosion": "pending"}
    assert after(entropy_nats_sum=0.1, entropy_nats_count=100) == {"entropy_collapse": "pending"}
    assert after(entropy_nats_sum=140, entropy_nats_count=100) == {}
    assert after(repetition_ratio_sum=6, repetition_ratio_count=10) == {"repetition": "pending"}
    assert after(loops_detected_total=2, time_to_first_token_seconds_count=10) == {"loops": "pending"}
    assert after(loops_detected_total=1, time_to_first_token_seconds_count=10) == {}
    assert after(loops_detected_total=1) == {"loops": "pending"}, "of answers begun before"
    assert after(process_resident_bytes=95) == {"process_memory": "pending"}
    assert after(device_temperature_celsius=90) == {"device_hot": "pending"}
    full = {"device_memory_used_bytes": 97, "device_memory_total_bytes": 100}
    assert after(**full) == {"device_memory": "pending"}


def test_a_late_first_token_is_told():
    def slow(count: int) -> str:
        name, label = PREFIX + "time_to_first_token_seconds", '{model_name="m",le="'
        buckets = "".join(
            f'{name}_bucket{label}{le}"}} {n}\n' for le, n in (("5.0", 0), ("7.5", count), ("+Inf", count))
        )
        return own(generation_tokens_total=count) + buckets

    watched = watch()
    watched.see(read(slow(1), 0.0, "h"))
    assert states(watched.see(read(slow(9), 1.0, "h"))) == {"ttft_high": "pending"}


def test_what_needs_an_hour_of_history_is_named_as_not_told():
    assert UNTOLD == ("LlmThroughputDrop",)


def test_a_server_that_is_lost_is_told_and_found_again():
    watched = watch()
    watched.see(read(vllm(100), 0.0, "h"))
    reading = watched.lost(InputError("monitor.unreachable", url="h", reason="refused"))
    assert states(reading) == {"target_down": "pending"}
    assert "refused" in reading.fault and reading.figures.requests_running is None
    found = watched.see(read(vllm(10), 5.0, "h"))
    assert found.fault is None and "target_down" not in states(found)
    assert found.window_s == 0, "what happened while it was away is not known"


def test_over_a_real_socket_a_second_look_tells_rates():
    with served(sends(growing(lambda at: vllm(100 * at)))) as address:
        reading = second_look(Watch(address_of(address)), 0.1)
    assert reading.server == "vLLM" and reading.url == f"http://{address}/metrics"
    assert 0 < reading.figures.tokens_per_s <= 1000


def test_readings_go_on_when_the_server_goes_away():
    with served(sends(growing(lambda at: vllm(100 * at)))) as address:
        looks = readings(Watch(address_of(address)), 0.05)
        assert [next(looks).fault, next(looks).fault] == [None, None]
    assert "127.0.0.1" in next(looks).fault
    assert next(looks).alerts[0].key == "target_down"
