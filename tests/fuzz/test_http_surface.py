"""Requests that are wrong in every way, sent to every HTTP operation of a running deployment."""

from __future__ import annotations

import httpx

from tests.fuzz.campaign import FULL, Kept, campaign, seeded, too_few
from tests.fuzz.deployment import Deployment
from tests.fuzz.http_cases import Cases
from tests.fuzz.http_sending import HttpSender

REQUESTS = FULL or 450


async def test_requests_that_are_wrong(served: Deployment, kept: Kept) -> None:
    """``campaign`` fails for each answer that none may get; here answers of every kind have to come."""
    document = httpx.get(f"http://{served.http}/openapi.json", timeout=10).json()
    make, sender = seeded("http", Cases(document)), HttpSender(served.http, document)
    seen = await campaign("http", served, REQUESTS, make, sender.send, kept)
    assert too_few(seen, 0.05, "200", "400") == []  # of several prompts or turns, one that is wrong is enough
    assert too_few(seen, 0, "404", "405", "413", "415", "closed") == []
