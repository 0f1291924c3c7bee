"""Structured output: the texts that a request allows, as masks over the vocabulary. No torch here, so that a router
can check a grammar with the very code that nodes mask with (docs/guides/structured_output.md)."""
