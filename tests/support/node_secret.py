"""What tests ask the nodes of a `server.serve` with. Apart from it, since clients are tested where there is no gRPC."""

from __future__ import annotations

from paceline.rpc.identity import Identity, Secret
from tests.support.server import SECRET

NODE_METADATA = Identity("router", Secret(SECRET).call_token).metadata
