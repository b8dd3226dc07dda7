"""Who is served by which revision: exact over many conversations, the same from turn to turn and everywhere."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.request import Endpoint, GenerationRequest
from gateway.rollouts.split import Split, conversation_of
from tests.fakes import principal

MANY = 20_000


def split(share_bp: int, *, new: str = "int4") -> Split:
    return Split(new, "stable", share_bp, elsewhere=True)


def request_of(account: str = "acct_a", **fields: Any) -> GenerationRequest:
    known: dict[str, Any] = {
        "id": "r",
        "principal": principal(account_id=account),
        "model": "m",
        "endpoint": Endpoint.CHAT,
        "route": "chat",
        "messages": ({"role": "user", "content": "Hello."},),
        "prompt": None,
        "sampling": {},
        "max_tokens": None,
        "n": 1,
        "stream": False,
        "reject_if_busy": False,
        "received_at_ns": 0,
        "deadline_s": 1.0,
    }
    return GenerationRequest(**known | fields)


def turns(*words: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    said = tuple({"role": roles[number % 2], "content": word} for number, word in enumerate(words))
    return {"messages": ({"role": "system", "content": "Be brief."}, *said)}


class TestShares:
    @pytest.mark.parametrize("share_bp", [1, 100, 1_000, 3_333, 5_000, 9_999])
    def test_of_many_conversations_the_new_one_gets_its_share(self, share_bp: int) -> None:
        served = sum(split(share_bp).revision_of(b"%d" % number) == "int4" for number in range(MANY))
        expected = MANY * share_bp / 10_000
        assert abs(served - expected) <= 4 * max(1.0, expected * (1 - share_bp / 10_000)) ** 0.5

    @given(st.binary(), st.integers(0, 10_000), st.integers(0, 10_000))
    def test_a_larger_share_takes_nobody_from_the_new_one(self, conversation: bytes, one: int, other: int) -> None:
        less, more = sorted((one, other))
        if split(less).revision_of(conversation) == "int4":
            assert split(more).revision_of(conversation) == "int4"

    @given(st.binary())
    def test_nothing_and_all_are_exact(self, conversation: bytes) -> None:
        assert split(0).revision_of(conversation) == "stable"
        assert split(10_000).revision_of(conversation) == "int4"

    def test_the_next_rollout_is_tried_on_others(self) -> None:
        tried = [{n for n in range(2_000) if split(1_000, new=new).revision_of(b"%d" % n) == new} for new in ("a", "b")]
        assert len(tried[0] & tried[1]) < len(tried[0]) / 4


class TestConversations:
    def test_later_turns_are_the_same_conversation(self) -> None:
        first, later = request_of(**turns("Hello.")), request_of(**turns("Hello.", "Hi.", "And now?"))
        assert conversation_of(first) == conversation_of(later)

    def test_another_beginning_is_another_one(self) -> None:
        assert conversation_of(request_of(**turns("Hello."))) != conversation_of(request_of(**turns("Good day.")))

    def test_a_session_that_the_client_names_is_one_whatever_is_said(self) -> None:
        one, other = request_of(session="s", **turns("Hello.")), request_of(session="s", **turns("Good day."))
        assert conversation_of(one) == conversation_of(other)

    def test_two_accounts_never_share_one(self) -> None:
        assert conversation_of(request_of("acct_a", session="s")) != conversation_of(request_of("acct_b", session="s"))

    def test_a_bare_prompt_is_one_by_itself(self) -> None:
        prompts = [request_of(messages=None, prompt=prompt) for prompt in ("a", "b", "a")]
        one, other, again = map(conversation_of, prompts)
        assert one == again != other
