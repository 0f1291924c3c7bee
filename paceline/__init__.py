"""Paceline: disaggregated prefill and decode with speculative decoding in every step."""

__version__ = "0.1.0"
