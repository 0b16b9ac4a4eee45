"""The way from the engine's thread to a client: in order, bounded, and never in the engine's way."""

import asyncio
import threading

from decodescope.web.feed import Feed


def test_records_come_in_the_order_they_were_delivered_in_whichever_thread():
    async def take() -> list[tuple[int, object]]:
        feed = Feed(lambda: None)
        deliver = [feed.deliver(index) for index in range(2)]
        thread = threading.Thread(target=lambda: [deliver[i % 2](i) for i in range(100)])
        thread.start()
        taken = [await feed.next() for _ in range(100)]
        thread.join()
        return taken

    assert asyncio.run(take()) == [(i % 2, i) for i in range(100)]


def test_one_that_falls_behind_is_told_of_once_and_gets_no_more():
    async def fall_behind() -> tuple[int, object, bool]:
        told = []
        feed = Feed(lambda: told.append(1), most=10)
        deliver = feed.deliver(0)
        for number in range(50):
            deliver(number)
        await asyncio.sleep(0)
        return len(told), await feed.next(), feed.overrun

    assert asyncio.run(fall_behind()) == (1, None, True)


def test_a_reader_that_keeps_up_gets_any_number():
    async def keep_up() -> list[int]:
        feed = Feed(lambda: None, most=3)
        deliver, taken = feed.deliver(0), []
        for number in range(50):
            deliver(number)
            taken.append(await feed.next())
        return [record for _, record in taken]

    assert asyncio.run(keep_up()) == list(range(50))


def test_silence_is_noticed():
    async def wait() -> object:
        return await Feed(lambda: None).next(seconds=0.01)

    assert asyncio.run(wait()) is None


def test_what_comes_after_the_loop_has_closed_is_dropped():
    async def make() -> Feed:
        return Feed(lambda: None)

    asyncio.run(make()).deliver(0)(None)
