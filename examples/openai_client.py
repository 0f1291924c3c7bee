"""The official OpenAI client against Paceline's HTTP: an answer, a stream with a prediction, an error.

Needs `pip install openai`.
"""

from __future__ import annotations

import argparse

import openai


def main() -> None:
    """Ask the router at --url."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="base URL of the HTTP API")
    parser.add_argument("--question", default="What is the capital of France, and what is it famous for?")
    options = parser.parse_args()
    client = openai.OpenAI(base_url=options.url, api_key="none")  # any key where the deployment has none
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": options.question}],
        temperature=0,
        max_tokens=48,
        extra_body={"speculation": {"num_draft_tokens": 2}},  # draft less for this request; the text stays the same
    )
    print(f"{model}: {answer.choices[0].message.content}")
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": options.question}],
        temperature=0,
        max_tokens=48,
        prediction={
            "type": "content",
            "content": answer.choices[0].message.content or "",
        },  # makes the same text sooner
        stream=True,
        stream_options={"include_usage": True},
    )
    for event in stream:
        if event.choices:
            print(event.choices[0].delta.content or "", end="", flush=True)
        elif event.usage and event.usage.completion_tokens_details:
            predicted = event.usage.completion_tokens_details.accepted_prediction_tokens
            print(f"\n[{event.usage.completion_tokens} tokens, {predicted} of them predicted]")
    try:
        client.completions.create(model=model, prompt="x", top_p=2)
    except openai.BadRequestError as error:
        print(f"refused: {error.param} of a request with top_p=2")


if __name__ == "__main__":
    main()
