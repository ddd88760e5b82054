"""Tests of the parser of judge replies with valid, malformed and truncated replies."""

import json

import numpy as np
import pytest

from poly_epo_jax.judges.reply import ReplyError, read_clustering, read_model_name

FENCE = "```"
GOOD = {"1": {"rationale": "Macro: a; micro: b", "cluster": 1}, "2": {"rationale": "Macro: none", "cluster": 100}}
TEXT = json.dumps(GOOD)


def completion(content, finish_reason="stop", **message) -> bytes:
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "message": {"role": "assistant", "content": content} | message,
    }
    return json.dumps({"object": "chat.completion", "choices": [choice]}).encode()


def changed(**verdict) -> str:
    """Returns a valid reply with changes to the verdict on response 2."""
    return json.dumps(GOOD | {"2": {"rationale": "Macro: c", "cluster": 2} | verdict})


def without(entry: str) -> str:
    return json.dumps(GOOD | {"2": {name: value for name, value in GOOD["2"].items() if name != entry}})


MALFORMED = {
    "not JSON": ["cluster 1", "{'1': 1}", TEXT.replace('"', "“"), TEXT.replace(", ", "; "), TEXT + "}"],
    "text around JSON": [
        f"Here it is: {TEXT}",
        f"{TEXT} I hope that this helps.",
        f"<think>\n{TEXT}\n</think>\n{TEXT}",
        f"{TEXT}\n{TEXT}",
        f"\ufeff{TEXT}",
    ],
    "code fence": [
        f"{FENCE}json\n{TEXT}\n{FENCE}",
        f"{FENCE}\n{TEXT}\n{FENCE}",
        f"{TEXT}\n{FENCE}",
        f"{FENCE}JSON {TEXT}",
        f"\n\n{FENCE}json\n{TEXT}",
    ],
    "missing response": [
        "{}",
        '{"1": {"rationale": "a", "cluster": 1}}',
        TEXT.replace('"2"', '" 2"'),
        TEXT.replace('"2"', '"02"'),
        TEXT.replace('"1"', '"\uff11"'),  # full-width digit
    ],
    "extra response": [json.dumps(GOOD | {name: GOOD["1"]}) for name in ("3", "0", "100", "", "summary")],
    "duplicate key": [
        TEXT[:-1] + ', "2": {"rationale": "a", "cluster": 2}}',
        TEXT[:-1] + ', "1": {"rationale": "Macro: a; micro: b", "cluster": 1}}',
        TEXT.replace('"cluster": 1}', '"cluster": 1, "cluster": 2}'),
        TEXT.replace('"cluster": 1}', '"cluster": 1, "rationale": "b"}'),
        TEXT.replace('"cluster": 1}', '"cluster": 1, "cl\\u0075ster": 1}'),
    ],
    "id out of range": [changed(cluster=cluster) for cluster in (0, 3, -1, 101, 10**30)],
    "id of another type": [changed(cluster=cluster) for cluster in ("2", 2.0, True, None, [2])],
    "no rationale": [*(changed(rationale=rationale) for rationale in ("", " \n", None, ["a"])), without("rationale")],
    "other shape": [
        json.dumps([GOOD["1"], GOOD["2"]]),
        json.dumps({"clusters": GOOD}),
        '{"1": 1, "2": 2}',
        without("cluster"),
        changed(confidence=1),
    ],
    "cut or endless": [TEXT[:-1], TEXT[:30], "{", '{"1": ' * 100_000, '{"1": ' + "9" * 5000 + "}"],
    "empty": ["", " \n ", None, [{"type": "text", "text": TEXT}], 7],
}


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_replies_are_rejected(kind, number):
    content = MALFORMED[kind][number]
    with pytest.raises(ReplyError) as caught:
        read_clustering(completion(content), 2)
    assert caught.value.kind == "malformed"
    assert len(str(caught.value)) < 300


def test_there_are_five_replies_of_each_kind():
    assert [len(contents) for contents in MALFORMED.values()] == [5] * 12


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (MALFORMED["text around JSON"][0], "leading text"),
        (MALFORMED["text around JSON"][1], "trailing text"),
        (MALFORMED["code fence"][0], "code fence"),
        (MALFORMED["missing response"][1], "response 2"),
        (MALFORMED["extra response"][0], ".'3'"),
        (MALFORMED["duplicate key"][0], "duplicate"),
        (MALFORMED["id out of range"][1], "response 2 .*: 3"),
        (MALFORMED["no rationale"][0], "response 2 .* rationale"),
        (MALFORMED["other shape"][0], "JSON object"),
        (MALFORMED["empty"][0], "empty"),
    ],
)
def test_the_reason_names_the_error(content, complaint):
    with pytest.raises(ReplyError, match=complaint):
        read_clustering(completion(content), 2)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"<html>502 Bad Gateway</html>",
        b"[]",
        b"null",
        b'"stop"',
        b'{"error": {"message": "no"}}',
        b'{"choices": []}',
        b'{"choices": {"0": 1}}',
        b'{"choices": [null]}',
        b'{"choices": [{"finish_reason": "stop"}]}',
        b'{"choices": [{"finish_reason": "stop", "message": null}]}',
        b'{"choices": [{"finish_reason": "stop", "message": "{}"}]}',
        b'{"choices": [{"finish_reason": null, "message": {"content": "{}"}}]}',
        b"[" * 100_000,
    ],
)
def test_a_body_without_a_completion_is_malformed(body):
    with pytest.raises(ReplyError) as caught:
        read_clustering(body, 2)
    assert caught.value.kind == "malformed"


@pytest.mark.parametrize("content", [TEXT, TEXT[:30], "", None])
@pytest.mark.parametrize("finish_reason", ["length", "abort", "content_filter", "tool_calls", ""])
def test_a_reply_without_a_regular_end_is_truncated_even_if_it_is_valid(content, finish_reason):
    with pytest.raises(ReplyError) as caught:
        read_clustering(completion(content, finish_reason), 2)
    assert caught.value.kind == "truncated"


@pytest.mark.parametrize(
    "body",
    [
        completion(TEXT),
        completion(f"\n {json.dumps(GOOD, indent=2)}\n\n"),
        completion(json.dumps(dict(reversed(GOOD.items())))),
        completion(None, reasoning_content=TEXT),
        completion(" \n", reasoning_content=TEXT),
        completion(None, reasoning=TEXT),
        completion(TEXT, reasoning_content="Let me see: {}"),
    ],
)
def test_a_valid_reply_is_parsed(body):
    clustering = read_clustering(body, 2)
    np.testing.assert_array_equal(clustering.ids, [1, 100])
    assert clustering.ids.dtype == np.int32
    assert clustering.rationales == ("Macro: a; micro: b", "Macro: none")


def test_rationales_are_printable():
    """Constrained decoding may leave raw control characters, and JSON can contain escapes of lone surrogates."""
    reply = TEXT.replace("Macro: none", "one\ntwo\0three\\ud800")
    assert read_clustering(completion(reply), 2).rationales == ("Macro: a; micro: b", "one\ntwo\ufffdthree\ufffd")


def test_the_first_listed_model_is_returned():
    assert read_model_name(b'{"object": "list", "data": [{"id": "judge-1"}, {"id": "judge-2"}]}') == "judge-1"
    for body in (b'{"data": []}', b"[]", b"{}", b'{"data": [{"id": 1}]}', b"oops"):
        with pytest.raises(ReplyError):
            read_model_name(body)
