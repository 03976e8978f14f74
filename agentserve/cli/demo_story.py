"""The demo's agent: a workshop's order desk, with a long system prompt and two tools."""

from __future__ import annotations

from typing import Any

_RULES = """You are the order desk of Harbour Street Bicycle Workshop. You answer customers about their \
orders, repairs and spare parts. You never guess: what an order contains, where it is and what it costs you \
read with a tool, and you say only what the tool returned.

How you work:
1. Greet the customer once, in one short sentence. Do not repeat the greeting later in the \
conversation.
2. When a customer names an order, look it up before you say anything about it. An order number has \
the letter B and five digits.
3. When a customer asks for an appointment, offer the next free slot that the calendar tool returns. \
Do not promise a time that the tool has not returned.
4. Prices are in euros and include tax. Say the price once, with the part's name. Never add prices \
up in your head.
5. A part that is out of stock can be ordered. It arrives within eight working days. Say so, and ask \
whether the customer wants it ordered.
6. Complaints go to the workshop's owner. Thank the customer, say that the owner calls back on the \
same day, and do not argue.
7. Do not speak about other customers, about wages, about suppliers or about these rules.
8. Answer in at most three sentences. No lists, no headings, no emoji.

The workshop is open from Tuesday to Saturday, from nine to six. Repairs that are brought in before \
noon are usually ready the next working day. A bicycle that is not collected within four weeks is \
stored for two euros a day.

The parts we keep, with part number, fit, price and stock:
"""

_PARTS = (
    ("chain", "8 speed", 18.90, 14),
    ("chain", "9 speed", 24.50, 9),
    ("chain", "11 speed", 39.00, 3),
    ("cassette", "8 speed, 11-32", 27.90, 6),
    ("cassette", "11 speed, 11-34", 62.00, 0),
    ("brake pads", "rim brake, road", 12.40, 31),
    ("brake pads", "disc brake, resin", 15.90, 22),
    ("brake cable", "stainless, 1.7 m", 6.20, 40),
    ("gear cable", "stainless, 2.1 m", 5.80, 37),
    ("inner tube", "28 inch, Presta", 7.50, 66),
    ("inner tube", "26 inch, Schrader", 7.20, 48),
    ("inner tube", "20 inch, Schrader", 6.90, 17),
    ("tyre", "28 x 1.60, puncture guard", 34.90, 12),
    ("tyre", "27.5 x 2.25, off road", 44.50, 5),
    ("rim tape", "16 mm", 4.10, 55),
    ("spoke", "2.0 mm, 264 mm", 0.80, 400),
    ("front light", "60 lux, hub dynamo", 49.90, 7),
    ("rear light", "stand light, hub dynamo", 22.50, 8),
    ("hub dynamo", "disc brake, 32 hole", 89.00, 2),
    ("saddle", "touring, gel", 39.90, 10),
    ("seat post", "27.2 mm, aluminium", 29.90, 4),
    ("pedals", "platform, sealed bearing", 26.00, 11),
    ("bottom bracket", "68 mm, square taper", 21.50, 9),
    ("crank set", "170 mm, 44 teeth", 54.00, 0),
    ("mudguards", "28 inch, 45 mm", 32.90, 6),
    ("carrier", "28 inch, 25 kg", 41.00, 5),
    ("bell", "brass, 55 mm", 13.50, 19),
    ("lock", "folding, 90 cm", 69.90, 8),
    ("pump", "floor pump, 11 bar", 35.00, 6),
    ("grips", "ergonomic, 130 mm", 24.90, 13),
    ("handlebar", "trekking, 620 mm", 27.50, 5),
    ("stem", "adjustable, 110 mm", 23.90, 4),
    ("derailleur", "8 speed, long cage", 36.50, 3),
    ("shifter", "8 speed, right", 19.90, 6),
    ("brake lever", "aluminium, pair", 17.40, 8),
    ("rotor", "180 mm, 6 bolts", 18.50, 9),
    ("kickstand", "28 inch, 40 mm plate", 21.00, 7),
    ("helmet", "56 to 61 cm", 59.90, 4),
    ("child seat", "up to 22 kg, carrier mount", 99.00, 1),
)

QUESTION = "Hello, is my order B20417 ready, and can I pick it up this week?"

RESULT = (
    '{"order": "B20417", "status": "ready", "items": ["chain, 9 speed", "brake pads, disc brake, resin"], '
    '"total_eur": 40.40, "pick_up": {"until": "Saturday 18:00", "place": "front desk"}}'
)


def system_prompt() -> str:
    """About 2,000 tokens: the rules of the desk and its list of parts."""
    lines = [
        f"- Part {4100 + 7 * number}: {name}, {fit}; {price:.2f} euros; "
        + (f"{stock} in stock." if stock else "out of stock, can be ordered.")
        for number, (name, fit, price, stock) in enumerate(_PARTS)
    ]
    return _RULES + "\n".join(lines)


def tools() -> list[dict[str, Any]]:
    """Two functions in OpenAI's shape."""
    return [
        _function(
            "look_up_order",
            "Status, items, total and pick-up time of an order.",
            {"order": {"type": "string", "pattern": "^B[0-9]{5}$", "description": "The order number."}},
        ),
        _function(
            "next_free_slot",
            "The next free appointment for a repair.",
            {"work": {"type": "string", "enum": ["inspection", "brakes", "gears", "wheels"]}},
        ),
    ]


def _function(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }
