"""Schemas as clients write them, each with a value of it."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def _object(**properties: object) -> Json:
    """A schema whose properties all must come, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TEXT = {"type": "string", "maxLength": 24}
SCHEMAS: dict[str, tuple[Json, Json]] = {  # a schema, and a value of it
    "weather tool": (
        _object(
            location=TEXT,
            temperature_unit={"enum": ["celsius", "fahrenheit"]},
            include_hourly_forecast={"type": "boolean"},
        ),
        {"location": "Reykjavik", "temperature_unit": "celsius", "include_hourly_forecast": True},
    ),
    "contact": (
        _object(
            first_name=TEXT,
            last_name=TEXT,
            email_address={"type": "string", "format": "email"},
            age_in_years={"type": "integer", "minimum": 0, "maximum": 150},
        ),
        {"first_name": "Ada", "last_name": "Lovelace", "email_address": "ada@example.org", "age_in_years": 36},
    ),
    "order": (
        _object(
            order_number={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{6}$"},
            line_items={
                "type": "array",
                "minItems": 1,
                "maxItems": 3,
                "items": _object(product_name=TEXT, quantity={"type": "integer"}, unit_price={"type": "number"}),
            },
            shipping_address=_object(street=TEXT, city=TEXT, postal_code=TEXT),
        ),
        {
            "order_number": "AB-123456",
            "line_items": [{"product_name": "lamp", "quantity": 2, "unit_price": 19.5}],
            "shipping_address": {"street": "Main Street 1", "city": "Springfield", "postal_code": "12345"},
        },
    ),
    "sentiment": (
        _object(
            overall_sentiment={"enum": ["positive", "negative", "neutral", "mixed"]},
            confidence_score={"type": "number", "minimum": 0, "maximum": 1},
            supporting_quotes={"type": "array", "items": TEXT, "maxItems": 3},
        ),
        {"overall_sentiment": "positive", "confidence_score": 0.9, "supporting_quotes": ["well made"]},
    ),
    "tree": (
        {
            "$defs": {"node": _object(label=TEXT, children={"type": "array", "items": {"$ref": "#/$defs/node"}})},
            "$ref": "#/$defs/node",
        },
        {"label": "root", "children": [{"label": "left", "children": []}, {"label": "right", "children": []}]},
    ),
}
