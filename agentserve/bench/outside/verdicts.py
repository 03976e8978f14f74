"""What giraffe found, check by check: what it says, which answers were not those expected, and what no
answer of a model explains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

SHOWN = 6  # of the answers that were wrong, and of the faults of one check

_Found = Mapping[str, Any]  # a part of giraffe's report; its form is giraffe's own


class Verdict(msgspec.Struct, frozen=True):
    """One check of one plan on one server."""

    server: str
    plan: str
    check: str
    status: str  # giraffe's word: pass, fail, inconclusive
    right: int  # answers that were the expected ones
    scored: int
    cause: str  # "": it passed; "model": only answers were wrong; "server"; "open": neither is shown
    wrong: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


class Checked(msgspec.Struct, frozen=True):
    """A run of all plans on each server, as it is kept."""

    benchmark: str
    commands: Mapping[str, str]  # by server
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    model: str
    servers: Mapping[str, str]  # name -> version
    plans: Mapping[str, str]  # name -> what is asked for
    verdicts: Sequence[Verdict]

    def beside(self, folder: Path) -> Checked:
        """Together with what the same file in `folder` has of other servers. ValueError for another file."""
        try:
            text = (folder / f"{self.benchmark}.json").read_bytes()
        except FileNotFoundError:
            return self
        kept = msgspec.json.decode(text, type=Checked)
        return msgspec.structs.replace(
            self,
            commands={**kept.commands, **self.commands},
            servers={**kept.servers, **self.servers},
            verdicts=[one for one in kept.verdicts if one.server not in self.servers] + list(self.verdicts),
        )


def verdicts(
    report: _Found, server: str, plan: str, checks: Sequence[str], ended: int | None
) -> list[Verdict]:
    """`ended`: turns that the server broke off while this plan ran, by its own count; None: it counts
    none."""
    found = {entry["id"]: entry for entry in report["checks"]}
    return [_verdict(found[name], report["requests"], server, plan, ended) for name in checks]


def shown(found: Sequence[Verdict], server: str) -> dict[str, str]:
    """What came of each check over all plans: "server" where something is the server's, "pass", "pass, X"
    where it passed in plan X alone, "model", "open"."""
    come: dict[str, str] = {}
    for name in dict.fromkeys(verdict.check for verdict in found):
        mine = [verdict for verdict in found if verdict.server == server and verdict.check == name]
        causes = [verdict.cause for verdict in mine]
        passed = [verdict.plan for verdict in mine if not verdict.cause]
        if "server" in causes:
            come[name] = "server"
        elif passed:
            come[name] = "pass" if not causes[0] else f"pass, {passed[0]}"
        else:
            come[name] = "model" if "model" in causes else "open"
    return come


def _verdict(entry: _Found, requests: Sequence[_Found], server: str, plan: str, ended: int | None) -> Verdict:
    name, status, metrics = str(entry["id"]), str(entry["status"]), entry["metrics"]
    mine = [request for request in requests if name in request["check_ids"]]
    wrong = list(dict.fromkeys(_wrong(mine, name)))
    faults = [*_requests(mine), *_of_check(name, metrics, mine, ended)]
    if faults:
        cause = "server"
    elif status == "pass":
        cause = ""
    else:
        cause = "model" if wrong else "open"
    answers = [request["score"] for request in mine if request["score"] is not None]
    right = answers.count(True)
    told = (tuple(texts[:SHOWN]) for texts in (wrong, faults))
    return Verdict(server, plan, name, status, right, len(answers), cause, *told)


def _wrong(requests: Sequence[_Found], check: str) -> Iterator[str]:
    """Answers that were not those expected, as giraffe quotes them. A call that is missing is not scored."""
    for request in requests:
        missing = check == "tools" and request["score"] is None
        if request["score"] is False or missing:
            yield f"{request['scenario']}: {request['score_message']}"


def _requests(requests: Sequence[_Found]) -> Iterator[str]:
    """Requests that failed, or were not answered in the form of the protocol."""
    for request in requests:
        if request["intentional"]:
            continue
        if request["status"] != "completed" or not request["valid"]:
            yield f"{request['scenario']}: {request['status']}: {request['error']}"
        for part in ("protocol", "choice", "arguments"):
            judged = (request["tool_evaluation"] or {}).get(part) or {}
            if judged.get("status") == "fail":
                yield f"{request['scenario']}: {judged['message']}"


def _of_check(name: str, metrics: _Found, requests: Sequence[_Found], ended: int | None) -> Iterator[str]:
    if name == "prefix":
        repeats = metrics["cache_repeat_misses"]
        if repeats["misses"] or repeats["observed"] < repeats["planned"]:
            yield f"the prefix was found in {metrics['cache_reuse_samples']} of {repeats['planned']} repeats"
        if not metrics["cache_controls_discriminative"]:
            yield "prompts that nobody sent before are told as found, or nothing is told of them"
    elif name == "cancellation":
        if too_long := metrics.get("output_cap_violations"):  # told only where something failed
            yield f"{len(too_long)} answers are longer than was asked for"
        if metrics["stop_enforcement"]["status"] == "fail":
            yield "an answer went on behind its stop string"
        if metrics["followup_delay"]["delayed"]:
            yield "requests that followed a cancelled one were late"
        left = sum(request["status"] in ("cancelled", "timeout") for request in requests)
        if ended is not None and ended < left:
            yield f"{ended} of {left} turns whose clients left were ended"
