"""Twenty prompts for the real model, short and long, some that repeat themselves."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from paceline.request import SamplingParams, SequenceRequest

QUESTIONS = [
    "What is the capital of France, and what is it famous for?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child in three sentences.",
    "List five animals that live in the desert.",
    "Translate into Spanish: The book is on the table.",
    "What is 17 times 23? Think step by step.",
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "Give me a recipe for pancakes.",
    "Write a Python function that reverses a string.",
    "Summarize: Tom went to the market. Tom bought apples. Tom went home. Tom ate the apples. Tom was happy.",
    "Who wrote Romeo and Juliet?",
    "Name the planets of the solar system in order.",
    "Write a short e-mail asking for a day off.",
    "What are the primary colours?",
    "Count from one to twenty in words.",
    "Describe a sunset in one paragraph.",
    "Why is the sky blue?",
    "Complete: roses are red, violets are",
    "Copy this list and sort it: pear, apple, fig, banana, cherry, apple, pear.",
    "Hi!",
]
EOS = 2


def prompt_requests(folder: Path, max_tokens: int) -> list[SequenceRequest]:
    """Each question at temperature 0 and 1, in the chat format of SmolLM2."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    requests = []
    for i, question in enumerate(QUESTIONS):
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=100 + i, max_tokens=max_tokens, stop_token_ids=(EOS,))
            requests.append(SequenceRequest(f"q{i}t{temperature:g}", ids, params))
    return requests


def one_temperature_each(requests: list[SequenceRequest]) -> list[SequenceRequest]:
    """Half of ``prompt_requests``: every question once, greedy and sampled in turn."""
    return [request for i, request in enumerate(requests) if i % 4 in (0, 3)]
