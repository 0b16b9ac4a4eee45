"""Store what transformers generates on the two starter models: tests/parity/references.json.

The dequantised GGUF weights run in float32 through `generate`, prompt by prompt. Tests compare our ids with the
stored ones and compute two of them again each time.
"""

import json
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers.normalizers import NFC

from decodescope.models import find_model

FILE = Path(__file__).resolve().parent.parent / "tests" / "parity" / "references.json"
END_IDS = {"starter": [151645, 151643], "starter-small": [2, 0]}

GREEDY = [
    "用一句话解释什么是大语言模型", "请写一首关于春天的诗", "你好", "1到10的质数有哪些？", "解释一下什么是KV缓存",
    "把“我爱编程”翻译成英文", "北京有哪些名胜古迹？", "写一个Python函数，判断一个数是否为质数",
    "为什么天空是蓝色的？", "给我讲一个关于猫的笑话", "What is the capital of France?",
    "Write a haiku about autumn.",
    "Explain recursion in one sentence.", "List three uses of a paperclip.", "def fibonacci(n):",
    "Translate 'good morning' into German.", "What is 17 times 23?", "Reverse the string 'hello' in Rust.",
    "🎉 means what?", "Summarise the water cycle.",
]  # fmt: skip
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 1.5, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 5, "no_repeat_ngram_size": 2},
    {"temperature": 0.3, "top_p": 0.95},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.2, "top_k": 100, "min_p": 0.02},
    {"temperature": 0.9, "top_p": 0.5},
    {"temperature": 2.0, "top_k": 10},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
]


class Reference:
    """One GGUF file in transformers: float32, its own chat template, its own `generate`."""

    def __init__(self, name: str) -> None:
        path = find_model(name, download=False).path
        self.name, self.end_ids = name, END_IDS[name]
        self._where: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        self.model = transformers.AutoModelForCausalLM.from_pretrained(**self._where, dtype=torch.float32).eval()
        self.model.generation_config = transformers.GenerationConfig()

    @cached_property
    def tokenizer(self) -> Any:
        """Built only where prompts are made: reading the vocabulary takes transformers some seconds."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(**self._where)
        if self.name == "starter":  # the converter of GGUF tokenizers leaves the Qwen family's normaliser out
            tokenizer.backend_tokenizer.normalizer = NFC()
        return tokenizer

    def prompt_ids(self, text: str) -> list[int]:
        """The ids of a user's message behind the chat template."""
        messages = [{"role": "user", "content": text}]
        rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer.encode(rendered, add_special_tokens=False))

    def generate(self, case: dict[str, Any]) -> list[int]:
        """The new ids of one case; its `settings` go to `generate` as they are."""
        if "seed" in case:
            torch.manual_seed(case["seed"])
        # top_k is always passed: transformers 5 would add 50 by itself.
        settings = {"do_sample": "seed" in case, **({"top_k": 0} if "seed" in case else {}), **case["settings"]}
        ids = torch.tensor([case["prompt_ids"]])
        end = self.end_ids if case["stops"] else None
        self.model.generation_config.eos_token_id = end
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=case["max_new_tokens"],
            pad_token_id=self.end_ids[-1],
            **settings,
        )
        return [int(i) for i in out[0, ids.shape[1] :]]

    def cases(self) -> list[dict[str, Any]]:
        """20 greedy prompts of 64 tokens, half of them running over end tokens, and 12 sampled ones of 16."""
        cases: list[dict[str, Any]] = []
        for number, text in enumerate(GREEDY):
            common = {"text": text, "prompt_ids": self.prompt_ids(text), "settings": {}}
            cases.append({**common, "stops": number % 2 == 0, "max_new_tokens": 64})
        for number, settings in enumerate(SAMPLED):
            text = GREEDY[number]
            common = {"text": text, "prompt_ids": self.prompt_ids(text), "settings": settings}
            cases.append({**common, "stops": True, "max_new_tokens": 16, "seed": 1000 + number})
        return cases


def main() -> int:
    """Compute and store everything; progress on standard error."""
    transformers.logging.set_verbosity_error()
    stored: dict[str, Any] = {"transformers": transformers.__version__, "torch": torch.__version__, "cases": {}}
    for name in END_IDS:
        reference = Reference(name)
        cases = reference.cases()
        for number, case in enumerate(cases, start=1):
            started = time.perf_counter()
            case["ids"] = reference.generate(case)
            print(f"{name} {number}/{len(cases)} {time.perf_counter() - started:.1f} s", file=sys.stderr)
        stored["cases"][name] = cases
    FILE.write_text(json.dumps(stored, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
