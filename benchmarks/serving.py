"""Eight clients of one server against one: tokens a second in all, and whether each gets the answer it gets alone.

    python benchmarks/serving.py [--rounds 3] [any option of `decodescope serve`: --dtype bfloat16 ...]

One client sends its questions one after the other, eight send theirs together, in turns; over HTTP, as streams.
"""

import argparse
import json
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx2 as httpx

CLIENTS, TOKENS = 8, 64
QUESTIONS = (
    "Tell me a story about a fox.",
    "写一首关于春天的诗",
    "Write quicksort in Python.",
    "What is a KV cache?",
    "Explain rotary position embeddings in one paragraph.",
    "List ten animals.",
    "How do I boil an egg?",
    "用一句话解释什么是大语言模型",
)
Answer = tuple[int, ...]


@contextmanager
def server(options: Sequence[str]) -> Iterator[httpx.Client]:
    """A client of a server that is there for as long as the block."""
    token = secrets.token_urlsafe(32)
    command = [sys.executable, "-m", "decodescope", "serve", "--port", "0", "--token", token, "--json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            serving = json.loads(process.stdout.readline())
            headers = {"Authorization": f"Bearer {token}"}
            base = f"http://{serving['host']}:{serving['port']}"
            with httpx.Client(base_url=base, headers=headers, timeout=600) as client:
                yield client
        finally:
            process.terminate()


def ask(client: httpx.Client, question: str, tokens: int = TOKENS) -> Answer:
    """The ids of a greedy answer of so many tokens."""
    wanted = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0, "max_tokens": tokens, "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    ids: list[int] = []
    with client.stream("POST", "/v1/chat/completions", json=wanted) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    ids += choice.get("token_ids") or ()
    return tuple(ids)


def timed(client: httpx.Client, clients: int) -> tuple[float, list[Answer]]:
    """Tokens a second of so many clients who share the questions, and the answers."""
    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda question: ask(client, question), QUESTIONS))
    return sum(map(len, answers)) / (time.perf_counter() - started), answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    given, options = parser.parse_known_args()
    with server(options) as client:
        _, alone = timed(client, 1)  # warm, and the answers to compare with
        rounds = [(timed(client, 1), timed(client, CLIENTS)) for _ in range(given.rounds)]
    one, eight = (statistics.median(row[which][0] for row in rounds) for which in (0, 1))
    ratio = statistics.median(many[0] / single[0] for single, many in rounds)
    same = sum(a == b for _, (_, answers) in rounds for a, b in zip(answers, alone, strict=True))
    print(f"{'clients':>8} {'tokens/s':>9}")
    print(f"{1:>8} {one:>9.1f}")
    print(f"{CLIENTS:>8} {eight:>9.1f}   {ratio:.2f} x (median of {given.rounds} rounds in turns)")
    print(f"answers of {CLIENTS} clients equal to those alone: {same} of {given.rounds * len(QUESTIONS)}")


if __name__ == "__main__":
    main()
