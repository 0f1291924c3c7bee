"""A server for tests of programs that use the SDK: it speaks the router's gRPC, and says what the test scripts.

    from paceline.client import Client
    from paceline.client.testing import Answer, FakeServer

    with FakeServer("Paris.", Answer("Rome.", breaks_after=3)) as server, Client(server.address) as client:
        assert client.generate("The capital of France?", temperature=0).text == "Paris."
        assert "".join(chunk.text for chunk in client.stream("And of Italy?")) == "Rome."
        assert server.requests[0].options == {"temperature": 0.0}

It needs no model, and nothing beyond what the SDK needs.
"""

from paceline.client.testing.asked import Asked
from paceline.client.testing.script import Answer, Script
from paceline.client.testing.server import FakeServer

__all__ = ["Answer", "Asked", "FakeServer", "Script"]
