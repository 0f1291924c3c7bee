"""A stream that survives the death of a router: the SDK goes on at the next address, at the next token.

Start two deployments of one model, stream, and kill the first one in the middle:

    paceline serve --grpc 127.0.0.1:50051 --http 127.0.0.1:8000
    paceline serve --grpc 127.0.0.1:50061 --http 127.0.0.1:8001
    python examples/streaming_with_failover.py --server 127.0.0.1:50051 --server 127.0.0.1:50061
"""

from __future__ import annotations

import argparse
import sys

from paceline.client import Client, PacelineError


def main() -> None:
    """Stream from the first --server that answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", required=True, help="HOST:PORT of a router's gRPC; repeat it")
    parser.add_argument("--prompt", default="Once upon a time", help="text to go on with")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer")
    parser.add_argument("--seed", type=int, default=7, help="the same seed gives the same text")
    options = parser.parse_args()
    expected = 0  # index of the next token: none comes twice, none is left out
    with Client(options.server, retries=8) as client:
        stream = client.stream(options.prompt, max_tokens=options.max_tokens, seed=options.seed, ignore_eos=True)
        try:
            for chunk in stream:
                assert chunk.first_index == expected or not chunk.token_ids
                expected += len(chunk.token_ids)
                print(chunk.text, end="", flush=True)
        except PacelineError as error:  # no router was left, or its tries ran out
            sys.exit(f"\nthe stream broke after {expected} tokens: {error}")
    print(f"\n[{expected} tokens]")


if __name__ == "__main__":
    main()
