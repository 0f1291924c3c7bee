"""Train draft heads on a target's own answers: corpus, features, heads, loop (``paceline train-drafter``)."""
