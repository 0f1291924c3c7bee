"""Structured output: an answer as an object, a choice, a text by a pattern. Needs `pip install pydantic`."""

from __future__ import annotations

import argparse
from typing import Literal

from pydantic import BaseModel

from paceline.client import Client, IncompleteAnswer, choices_of


class City(BaseModel):
    """What the answer is to be."""

    name: Literal["Paris", "Rome", "Madrid"]
    country: Literal["France", "Italy", "Spain"]


def main() -> None:
    """Ask the router at --server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="127.0.0.1:50051", help="HOST:PORT of a router's gRPC")
    parser.add_argument("--seed", type=int, default=7, help="the same seed gives the same text")
    options = parser.parse_args()
    question = [{"role": "user", "content": "Name a city and its country, in JSON."}]
    with Client(options.server) as client:
        city = client.parse(City, question, max_tokens=64, seed=options.seed)
        print(f"parsed: {city.name} in {city.country}")

        chunks = []  # the same as a stream: the text comes in pieces, and the object at the end
        for chunk in client.stream(question, response_format=City, max_tokens=64, seed=options.seed):
            chunks.append(chunk)
            print(chunk.text, end="", flush=True)
        (choice,) = choices_of(chunks)
        print(f"\nstreamed, the same object: {choice.parsed(City) == city}")

        try:
            client.parse(City, question, max_tokens=4, seed=options.seed)
        except IncompleteAnswer as error:
            print(f"cut off after: {error.text!r}")

        done = client.chat([{"role": "user", "content": "Is Rome in Italy?"}], choice=["yes", "no"], seed=options.seed)
        print(f"chosen: {done.text}")
        done = client.generate("The year of the moon landing: ", regex="19[0-9]{2}", seed=options.seed)
        print(f"by a pattern: {done.text}")


if __name__ == "__main__":
    main()
