"""Runs of tokens as text, for servers that take only text: plain words, about one token each."""

from __future__ import annotations

import random

from agentserve.sim.traces.agents import Run

_TEXT = """
about above after again along among answer apple around autumn basket before begin behind below
between black bottle bread bridge bright bring build butter candle carry chair change child circle
city clear clock cloud colour common copper corner cotton country cover cross dance direct dinner
doctor door dream early earth edge engine evening every farm father field finger fire floor flower
forest friend garden glass gold grass green ground group half hand happy harbour heart heavy history
horse hour house island journey kitchen ladder lake large letter light little long machine market
matter middle minute money morning mother mountain music name narrow nature night north number ocean
office orange order paper parent people picture place plain plant point power pretty price problem
public quick quiet rain ready record red river road room round school season second seven short
silver simple small smooth snow sound south spring square station stone story street strong summer
table ticket together tower travel under valley village voice wall warm water weather west wheel
white window winter wood work world yellow
"""
WORDS = tuple(_TEXT.split())


def text_of(run: Run) -> str:
    """The text of a run: as many words as it has tokens; the same run is the same text."""
    return " ".join(random.Random(run.seed).choices(WORDS, k=run.count))
