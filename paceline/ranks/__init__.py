"""Nodes of several ranks: processes of one host that each hold a part of every layer (docs/internals/parallel.md).

Rank 0 is the node itself and leads: it schedules, samples and drafts. The others follow: they run their part of each
forward, and hold their heads' KV.
"""
