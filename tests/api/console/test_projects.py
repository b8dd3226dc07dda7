"""An account's projects over the console, on a real database."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.console.administered import Administered, administered


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Administered]:
    with administered(tmp_path) as world:
        yield world


async def test_a_project_is_opened_renamed_archived_and_restored(world: Administered) -> None:
    opened = await world.ask("POST", "/projects", {"name": "search"})
    assert (opened.status, opened.json["default"]) == (201, False)
    tail = f"/projects/{opened.json['id']}"
    renamed = await world.ask("PATCH", tail, {"name": "find"})
    assert (renamed.status, renamed.json["name"]) == (200, "find")
    assert (await world.ask("PATCH", tail, {"archived": True})).json["archived_at"] is not None
    assert (await world.ask("PATCH", tail, {"archived": False})).json == renamed.json
    assert (await world.ask("GET", tail)).json == renamed.json
    listed = (await world.ask("GET", "/projects")).json["projects"]
    assert [(one["name"], one["default"]) for one in listed] == [("default", True), ("find", False)]
    entries = (await world.ask("GET", "/audit")).json["entries"]
    assert {entry["action"] for entry in entries} >= {
        "project.open",
        "project.rename",
        "project.archive",
        "project.restore",
    }


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"name": ""}, 400),
        ({"name": "two\nlines"}, 400),
        ({"name": "x", "more": 1}, 400),
        ({"name": "default"}, 409),
    ],
)
async def test_what_is_no_project_is_refused(world: Administered, body: dict[str, object], status: int) -> None:
    assert (await world.ask("POST", "/projects", body)).status == status


async def test_the_default_project_can_not_be_archived(world: Administered) -> None:
    refused = await world.ask("PATCH", f"/projects/{world.account_id}", {"archived": True})
    assert (refused.status, refused.json["code"]) == (400, "invalid_parameter")


async def test_a_key_is_issued_in_a_project_and_refused_once_that_is_archived(world: Administered) -> None:
    project_id = (await world.ask("POST", "/projects", {"name": "search"})).json["id"]
    body = {"name": "k", "kind": "admin", "project_id": project_id}
    key = (await world.ask("POST", "/keys", body)).json
    assert key["project_id"] == project_id
    assert (await world.ask("POST", "/keys", {"name": "k"})).json["project_id"] == world.account_id
    assert (await world.ask("GET", "/keys", key=key["key"])).status == 200
    await world.ask("PATCH", f"/projects/{project_id}", {"archived": True})
    refused = await world.ask("GET", "/keys", key=key["key"])
    assert (refused.status, refused.json["code"]) == (403, "project_archived")


async def test_a_projects_list_of_models_binds_a_key_that_names_more(world: Administered) -> None:
    project = (await world.ask("POST", "/projects", {"name": "search", "models": ["m0", "m1"]})).json
    assert project["models"] == ["m0", "m1"]
    tail = f"/projects/{project['id']}"
    bodies: list[dict[str, object]] = [{"name": "k"}, {"name": "k", "models": ["m1", "m2"]}]
    keys = [(await world.ask("POST", "/keys", body | {"project_id": project["id"]})).json for body in bodies]

    async def usable() -> list[list[str]]:
        found = [await world.authenticator.authenticate(key["key"]) for key in keys]
        return [[model for model in ("m0", "m1", "m2") if one.may_use(model)] for one in found]

    assert await usable() == [["m0", "m1"], ["m1"]]
    assert (await world.ask("PATCH", tail, {"name": "find"})).json["models"] == ["m0", "m1"]
    assert (await world.ask("PATCH", tail, {"models": ["m0"]})).json["models"] == ["m0"]
    assert await usable() == [["m0"], []]
    assert (await world.ask("PATCH", tail, {"models": None})).json["models"] is None
    assert await usable() == [["m0", "m1", "m2"], ["m1", "m2"]]
    # The operator's own key says what the whole account may use.
    assert (await world.ask("PATCH", "", {"models": ["m2"]})).json["models"] == ["m2"]
    assert await usable() == [["m2"], ["m2"]]


@pytest.mark.parametrize("models", [[], ["two words"], "m0", [1]])
async def test_what_is_no_list_of_models_is_refused(world: Administered, models: object) -> None:
    for method, tail in (("POST", "/projects"), ("PATCH", f"/projects/{world.account_id}")):
        assert (await world.ask(method, tail, {"name": "x", "models": models})).status == 400


async def test_a_foreign_project_is_answered_as_an_unknown_one(world: Administered) -> None:
    theirs = await world.ask("POST", "/projects", {"name": "x"}, key=world.other.text, account_id=world.other_id)
    answers = []
    for project_id in (theirs.json["id"], world.other_id, "f" * 32):
        for method, tail, body in (
            ("GET", f"/projects/{project_id}", b""),
            ("PATCH", f"/projects/{project_id}", {"name": "mine"}),
            ("POST", "/keys", {"name": "k", "project_id": project_id}),
        ):
            answer = await world.ask(method, tail, body)
            answers.append((answer.status, answer.json["code"], answer.json["detail"]))
    assert set(answers) == {(404, "project_not_found", "There is no such project in this account.")}
