"""Tests of the parser of judge replies with valid, malformed and truncated replies."""

import json

import numpy as np
import pytest

from poly_epo_jax.judges.prompt import ReplyKeys
from poly_epo_jax.judges.reply import ReplyError, read_clustering, read_error, read_model_name

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
        f"{TEXT}\n{TEXT}",
        f"Right.\n<think>\n</think>\n{TEXT}",
        f"\ufeff{TEXT}",
    ],
    "code fence": [
        f"{FENCE}json\n{TEXT}\n{FENCE}\nDone.",
        f"{FENCE}python\n{TEXT}\n{FENCE}",
        f"{TEXT}\n{FENCE}",
        f"{FENCE}JSON {TEXT}",
        f"\n\n{FENCE}json\n{TEXT}",
    ],
    "think block": [
        f"<think>\n{TEXT}",
        f"{TEXT}\n</think>\n{TEXT}",
        f"I count.\n</think>\n{TEXT}",
        f"<think>\na\n</think>\n<think>\nb\n{TEXT}",
        f"<think>\na\n</think>\nSo: {TEXT}",
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


@pytest.mark.parametrize(
    "content",
    [f"{FENCE}json{' ' * 100_000}x", f"{FENCE}json\n{{}}{' ' * 100_000}x", "`" * 100_000, "`" * 100_000 + "x"],
)
def test_long_whitespace_and_backticks_are_rejected_in_linear_time(content):
    """A parser that takes quadratic or cubic time would not return."""
    with pytest.raises(ReplyError, match="code fence is not closed"):
        read_clustering(completion(content), 2)


def test_there_are_five_replies_of_each_kind():
    assert [len(contents) for contents in MALFORMED.values()] == [5] * 13


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (MALFORMED["text around JSON"][0], "leading text"),
        (MALFORMED["text around JSON"][1], "trailing text"),
        (MALFORMED["code fence"][0], "code fence"),
        (MALFORMED["think block"][0], "think block is not closed"),
        (MALFORMED["think block"][2], "reasoning parser"),
        (MALFORMED["think block"][3], "think block is not closed"),
        (MALFORMED["think block"][4], "leading text"),
        (MALFORMED["code fence"][1], "leading text"),
        (MALFORMED["code fence"][4], "code fence is not closed"),
        (f"[{TEXT}", "delimiter"),
        (MALFORMED["missing response"][1], "response 2"),
        (MALFORMED["extra response"][0], ".'3'"),
        (MALFORMED["duplicate key"][0], "duplicate"),
        (MALFORMED["id out of range"][1], "response 2 .*: 3"),
        (MALFORMED["no rationale"][0], "response 2 must have a text .rationale"),
        (MALFORMED["other shape"][0], "JSON object"),
        (MALFORMED["empty"][0], "empty"),
        (MALFORMED["empty"][3], "list of parts"),
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
        completion(None, reasoning=TEXT),
        completion(f"<think>\n{FENCE}\n{TEXT}\n{FENCE}\n</think>\n\n{TEXT}"),
        completion(f"{FENCE}json\n{TEXT}\n{FENCE}\n"),
        completion(f"\n\n{FENCE}\n{json.dumps(GOOD, indent=2)}\n{FENCE}"),
        completion(f"<think></think>\n{FENCE}JSON\n{TEXT}\n{FENCE}"),
        completion(f"{FENCE}json\r\n{TEXT}\r\n{FENCE}\r\n"),
        completion(f"{FENCE}json {TEXT} {FENCE}"),
        completion(f"{FENCE}{TEXT}{FENCE}"),
        completion(f"{FENCE}`json\n{TEXT}\n{FENCE}`"),
        completion(f"<think>a</think>\n<think>\r\nb</think>\r\n{FENCE}json\r\n{TEXT}\r\n{FENCE}"),
        completion(f"\u00a0{TEXT}"),
        completion(TEXT, refusal=None),
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


@pytest.mark.parametrize(
    ("body", "kind", "cause"),
    [
        (completion(None, refusal="I cannot help."), "malformed", "refused to reply: 'I cannot help.'"),
        (completion(None, reasoning="I count."), "malformed", "content .* is empty, and its reasoning is not JSON"),
        (completion("", "length", reasoning_content="Hm"), "truncated", "before its content began; raise .*max_tokens"),
        (completion(TEXT[:30], "length"), "truncated", "token limit; raise judge.options.max_tokens"),
        (completion("", "content_filter"), "truncated", "content filter"),
    ],
)
def test_the_reason_names_the_cause_of_an_unusable_completion(body, kind, cause):
    with pytest.raises(ReplyError, match=cause) as caught:
        read_clustering(body, 2)
    assert caught.value.kind == kind


def test_the_entries_of_a_reply_can_have_other_names():
    keys = ReplyKeys("chain_of_thought", "cluster_id")
    reply = TEXT.replace("rationale", "chain_of_thought").replace('"cluster"', '"cluster_id"')
    assert read_clustering(completion(reply), 2, keys).rationales == ("Macro: a; micro: b", "Macro: none")
    for content, expected in ((TEXT, keys), (reply, ReplyKeys())):
        with pytest.raises(ReplyError, match=f"response 1 must have a text '{expected.rationale}' and"):
            read_clustering(completion(content), 2, expected)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"error": {"message": "busy", "code": 429}}', {"message": "busy", "code": 429}),
        (b'[{"error": {"status": "RESOURCE_EXHAUSTED"}}]', {"status": "RESOURCE_EXHAUSTED"}),
        (b'{"choices": [{"error": {"code": 502}}]}', {"code": 502}),
        (b'{"object": "error", "code": 400}', {"object": "error", "code": 400}),
        (b'{"error": "overloaded"}', {"message": "overloaded"}),
        (completion(TEXT), {}),
        (b'{"error": null, "choices": []}', {}),
        (b"<html>", {}),
        (b"[" * 100_000, {}),
    ],
)
def test_error_objects_of_common_servers_are_read(body, error):
    assert read_error(body) == error


def test_the_first_listed_model_is_returned():
    assert read_model_name(b'{"object": "list", "data": [{"id": "judge-1"}, {"id": "judge-2"}]}') == "judge-1"
    for body in (b'{"data": []}', b"[]", b"{}", b'{"data": [{"id": 1}]}', b"oops"):
        with pytest.raises(ReplyError):
            read_model_name(body)
