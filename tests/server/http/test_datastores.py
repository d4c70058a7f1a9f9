"""Datastores and operations over HTTP: search, documents from JSON and from files, remembering, deletion."""

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import made_files as made
import pytest
from running import PATIENCE_S, RunningServer
from texts import make_text

from memlm.client import Client
from memlm.server.http.records import object_of


@pytest.fixture(scope="module")
def growing_web(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, corpus_folder: Path
) -> Iterator[RunningServer]:
    """A server whose datastore grows in the tests."""
    folder = tmp_path_factory.mktemp("growing")
    options = ("--threads", "1", "--http-port", "0", "--store-dir", str(folder / "stores"))
    options += ("--corpus-root", str(corpus_folder), "+message_bytes=100000", "+upload_bytes=3000000")
    with RunningServer(folder / "log", model_folder, options=options) as server:
        with Client(server.address) as client:
            client.datastores.build("docs", str(corpus_folder), check="none").result(PATIENCE_S)
        yield server


@pytest.fixture
def http(growing_web: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=growing_web.http_url, timeout=PATIENCE_S) as http:
        yield http


def ended(http: httpx.Client, reply: httpx.Response) -> dict[str, Any]:
    """The operation of a reply, once it has ended."""
    assert reply.status_code == 202, reply.text
    operation = http.get(f"/v1/operations/{reply.json()['id']}", params={"wait_s": PATIENCE_S}).json()
    assert operation["has_ended"], operation
    return operation


def ids_with(http: httpx.Client, words: str) -> list[str]:
    found = http.post("/v1/datastores/docs/search", json={"text": words, "by": "words"}).json()["data"]
    return [each["document_id"] for each in found]


def test_the_figures_and_the_places_are_those_of_grpc(growing_web: RunningServer, http: httpx.Client) -> None:
    with Client(growing_web.address) as client:
        store = client.datastores.get("docs")
        places = client.search("docs", "the memory", k=3)
    shown = http.get("/v1/datastores/docs").json()
    assert http.get("/v1/datastores").json()["data"] == [shown]
    assert (shown["id"], shown["num_entries"], shown["lam"]) == ("docs", store.num_entries, store.lam)
    for path in ("/v1/datastores/docs/search", "/v1/datastores/search"):
        found = http.post(path, json={"text": "the memory", "k": 3}).json()["data"]
        assert [(each["document_id"], each["token_offset"]) for each in found] == [
            (place.document_id, place.token_offset) for place in places
        ]
    assert http.get("/v1/datastores/nowhere").status_code == 404


def test_a_trace_is_that_of_grpc(growing_web: RunningServer, http: httpx.Client) -> None:
    text = f"zzz {make_text(3, 60)} zzz"
    options = {"min_tokens": 4, "max_documents": 2, "rank_by": "length", "documents": ["doc-*"]}
    with Client(growing_web.address) as client:
        trace = client.trace(text, store="docs", **options)
    assert trace.spans
    shown = http.post("/v1/trace", json={"text": text, "store": "docs", **options}).json()
    assert (shown["tokens"], shown["traced_tokens"]) == (trace.tokens, trace.traced_tokens)
    assert [(each["begin"], each["end"], each["text"], each["count"]) for each in shown["spans"]] == [
        (span.begin, span.end, span.text, span.count) for span in trace.spans
    ]
    for each, span in zip(shown["spans"], trace.spans, strict=True):
        assert each["rarity"] == pytest.approx(span.rarity)
        assert [place["document_id"] for place in each["places"]] == [place.document_id for place in span.places]
    refusal = http.post("/v1/trace", json={"text": text, "min_tokens": 1})
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "min_tokens")


def test_documents_come_as_json_and_go(http: httpx.Client) -> None:
    documents = [{"id": f"json/{n}", "text": f"zebra number {n} walks", "metadata": {"n": n}} for n in range(3)]
    operation = ended(http, http.post("/v1/datastores/docs/documents", json={"documents": documents}))
    assert (operation["state"], operation["report"]["store"]) == ("done", "docs")
    assert ids_with(http, "zebra number") == ["json/0", "json/1", "json/2"]
    assert http.delete("/v1/datastores/docs/documents/json/1").json()["num_documents"] == 1
    assert http.delete("/v1/datastores/docs/documents/json/1").status_code == 404
    both = {"document_ids": ["json/0", "json/2"]}
    assert http.post("/v1/datastores/docs/documents/delete", json=both).json()["num_documents"] == 2
    assert ids_with(http, "zebra number") == []


def test_a_text_is_remembered(http: httpx.Client) -> None:
    body = {"text": "the gateway listens on port 7443", "title": "Gateway", "metadata": {"kind": "note"}}
    reply = http.post("/v1/datastores/docs/remember", json=body)
    assert (reply.status_code, reply.json()["store"]) == (200, "docs")
    assert ids_with(http, "gateway listens") == reply.json()["document_ids"]
    again = http.post("/v1/datastores/docs/remember", json=body)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "AlreadyExists")
    other = {"text": "the gateway listens on port 8443", "id": reply.json()["document_ids"][0], "replace": True}
    assert http.post("/v1/datastores/docs/remember", json=other).status_code == 200
    assert ids_with(http, "port 7443") == []
    assert ids_with(http, "port 8443") == [other["id"]]


@pytest.mark.parametrize("document", ["a\nb", "a\n", "\r\n", "a/", "a//b", "?", "%0A", "a\u2028"])
def test_an_id_of_any_characters_is_deleted_by_its_path(http: httpx.Client, document: str) -> None:
    assert http.post("/v1/datastores/docs/remember", json={"text": "odd id", "id": document}).status_code == 200
    deleted = http.delete(f"/v1/datastores/docs/documents/{quote(document, safe='')}")
    assert (deleted.status_code, ids_with(http, "odd id")) == (200, []), deleted.text


def test_files_of_a_form_become_documents(http: httpx.Client) -> None:
    long = make_text(3, 25_000) + " the yak é ends"  # several parts, and more than a message
    rows = b'{"id": "row-1", "text": "a yak eats", "kind": "yak"}\n\n{"text": "a yak sleeps"}'
    files = [("files", ("long.txt", long.encode())), ("files", ("rows.jsonl", rows))]
    assert len(long) > 100_000
    ended(http, http.post("/v1/datastores/docs/documents", files=files, params={"check": "none"}))
    assert ids_with(http, "a yak") == ["row-1", "rows.jsonl:3"]
    assert ids_with(http, "the yak é ends") == ["long.txt"]
    assert http.post(
        "/v1/datastores/docs/search", json={"text": "a yak", "by": "words", "where": {"kind": "yak"}}
    ).json()["data"][0]["metadata"] == {"kind": "yak"}
    again = ended(http, http.post("/v1/datastores/docs/documents", files=files[1:]))
    assert (again["state"], again["error"]["code"]) == ("failed", "AlreadyExists")
    replacing = {"replace": "true", "check": "none"}
    replaced = http.post("/v1/datastores/docs/documents", files=files[1:], params=replacing)
    assert ended(http, replaced)["state"] == "done"


def synced(http: httpx.Client, **request: Any) -> dict[str, Any]:
    params = {"sync": "manual", "check": "none", **request.pop("params", {})}
    operation = ended(http, http.post("/v1/datastores/docs/documents", params=params, **request))
    assert operation["state"] == "done", operation
    return {kind: ids for kind, ids in operation["report"]["sync"].items() if ids and not kind.startswith("num_")}


def test_a_datastore_follows_documents_that_are_sent(http: httpx.Client) -> None:
    """From JSON and from forms, under one name."""
    eats, sleeps = {"id": "s/a", "text": "the quoll eats"}, {"id": "s/b", "text": "the quoll sleeps"}
    assert synced(http, json={"documents": [eats, sleeps]}) == {"added": ["s/a", "s/b"]}
    assert synced(http, json={"documents": [eats], "keep": ["s/b"]}) == {"kept": ["s/b"]}
    other = {"id": "t", "text": "the quoll runs"}
    assert synced(http, json={"documents": [other], "keep": ["s"]}) == {"added": ["t"], "kept": ["s/a", "s/b"]}
    assert synced(http, json={"documents": [other], "keep": ["s//"]}) == {"kept": ["s/a", "s/b"]}
    body = {"documents": [other, {**eats, "text": "the quoll digs"}]}
    expected = {"replaced": ["s/a"], "deleted": ["s/b"]}
    assert synced(http, json=body, params={"dry_run": "true"}) == expected
    assert synced(http, json=body) == expected
    assert ids_with(http, "the quoll") == ["t", "s/a"]
    files = [("files", ("s/b", b"the quoll hides")), ("files", ("t", b"the quoll runs"))]
    assert synced(http, files=files) == {"added": ["s/b"], "deleted": ["s/a"]}
    assert sorted(ids_with(http, "the quoll")) == ["s/b", "t"]


def test_a_form_that_breaks_off_deletes_nothing(http: httpx.Client) -> None:
    files = [("files", (name, f"the numbat {name}".encode())) for name in ("n/1", "n/2", "n/3")]
    params = {"sync": "broken", "check": "none"}
    assert len(synced(http, files=files, params=params)["added"]) == 3
    request = http.build_request("POST", "/v1/datastores/docs/documents", files=files, params=params)
    body = request.read()
    begin = body.index(b"\r\n--", body.index(b"n/1"))
    ends = [*range(begin, body.index(b"n/2") + 3, 7), begin + 2 + len(body.split(b"\r\n")[0]) + 2, len(body) - 4]
    for end in ends:
        headers = {"content-type": request.headers["content-type"]}
        reply = http.post("/v1/datastores/docs/documents", content=body[:end], headers=headers, params=params)
        assert reply.status_code == 400, (body[:end], reply.text)
    assert sorted(ids_with(http, "the numbat")) == ["n/1", "n/2", "n/3"]


@pytest.mark.parametrize(
    ("body", "params", "expected"),
    [
        ({"documents": []}, {"sync": "x"}, "documents"),
        ({"documents": [{"id": "a", "text": "b"}]}, {"dry_run": "true"}, "dry_run is of a synchronization"),
        ({"documents": [{"id": "a", "text": "b"}], "keep": ["c"]}, {}, "of a synchronization"),
        ({"documents": [{"id": "a", "text": "b"}], "keep": ["s", "s/*"]}, {"sync": "x"}, "keep[1] is 's/*'"),
        ({"documents": [{"id": "a", "text": "b"}], "keep": [""]}, {"sync": "x"}, "keep[0] is ''"),
        ({"documents": [{"id": "a", "text": "b"}], "keep": ["/"]}, {"sync": "x"}, "keep[0] is '/'"),
        ({"documents": [{"id": "a", "text": "b"}]}, {"sync": "x" * 201}, "sync has 201 characters"),
    ],
)
def test_a_malformed_synchronization_is_refused(http: httpx.Client, body: Any, params: Any, expected: str) -> None:
    reply = http.post("/v1/datastores/docs/documents", json=body, params=params)
    assert (reply.status_code, expected in reply.text) == (400, True), reply.text


def test_uploads_follow_the_rules_of_files(http: httpx.Client) -> None:
    """Byte order marks, ids and titles."""
    rows = b'\xef\xbb\xbf{"id": 0, "text": "an okapi eats"}\n{"id": 1.0, "title": null, "text": "an okapi sleeps"}\n'
    files = [
        ("files", ("o.jsonl", rows)),
        ("files", ("utf-16.jsonl", '{"id": "w", "text": "an okapi ä"}'.encode("utf-16"))),
        ("files", ("utf-16.txt", "an okapi walks".encode("utf-16"))),
        ("files", ("marked.txt", b"\xef\xbb\xbfan okapi runs")),
    ]
    ended(http, http.post("/v1/datastores/docs/documents", files=files, params={"check": "none"}))
    places = http.post("/v1/datastores/docs/search", json={"text": "an okapi", "by": "words"}).json()["data"]
    assert [each["document_id"] for each in places] == ["0", "1", "w", "utf-16.txt", "marked.txt"]
    assert all(each["char_offset"] == 0 and not each["title"] for each in places)
    deletion = {"content": '\ufeff{"document_ids": ["0"]}', "headers": {"content-type": "application/json"}}
    assert http.post("/v1/datastores/docs/documents/delete", **deletion).json()["num_documents"] == 1


def test_files_of_other_formats_are_converted(http: httpx.Client) -> None:
    box = b"From a\nSubject: The ibex\n\nan ibex jumps\n\nFrom b\nSubject: x\n\nan ibex lands\n"
    files = [
        ("files", ("a.html", b"<title>Ibex</title><nav>home</nav><p>an ibex <b>eats</b>" + b"<p>more" * 20_000)),
        ("files", ("b.txt", b"an ibex sleeps")),
        ("files", ("c.pdf", made.pdf("an ibex climbs", title="On ibexes"))),
        ("files", ("d.docx", made.docx(made.paragraph("an ibex looks")))),
        ("files", ("e.mbox", box)),
        ("files", ("f.txt", "an ibex, größer".encode("latin-1"))),
        ("files", ("g", b"<!doctype html><p>an ibex &amp; more")),
    ]
    ended(http, http.post("/v1/datastores/docs/documents", files=files, params={"check": "none"}))
    found = http.post("/v1/datastores/docs/search", json={"text": "ibex", "by": "words", "k": 20}).json()["data"]
    titles = {each["document_id"]: (each["title"], each["metadata"].get("format")) for each in found}
    assert titles == {
        "a.html": ("Ibex", "html"),
        "b.txt": ("", None),
        "c.pdf": ("On ibexes", "pdf"),
        "d.docx": ("", "docx"),
        "e.mbox:1": ("The ibex", "mail"),
        "e.mbox:2": ("x", "mail"),
        "f.txt": ("", None),
        "g": ("", "html"),
    }
    assert not ids_with(http, "home an ibex")


@pytest.mark.parametrize("id_", ["a\nb", "\n", "a/b\r\nc\n", "a%0Ab", " ", "?", "a//b", "\u2028"])
def test_a_document_is_deleted_by_its_path_whatever_its_id(http: httpx.Client, id_: str) -> None:
    http.post("/v1/datastores/docs/remember", json={"text": f"the tapir {id_}", "id": id_}).raise_for_status()
    reply = http.delete(f"/v1/datastores/docs/documents/{quote(id_, safe='')}")
    assert (reply.status_code, reply.json().get("num_documents")) == (200, 1), reply.text


@pytest.mark.parametrize(
    ("field", "name", "content", "status"),
    [
        ("files", "a.txt", b"\xff\xfe", 400),
        ("files", "a.txt", "é".encode()[:1], 400),
        ("files", "a.txt", b"  ", 400),
        ("files", "a.txt", b"a\0b", 400),
        ("files", "a.jsonl", b"{", 400),
        ("files", "a.jsonl", b'{"id": true, "text": "a"}', 400),
        ("files", "a.jsonl", b'{"id": [1], "text": "a"}', 400),
        ("files", "a.jsonl", b'{"id": 1.5, "text": "a"}', 400),
        ("files", "a.jsonl", b"\xff\xfea", 400),
        ("files", "a.txt", b"\xef\xbb\xbf", 400),
        ("files", "a.jsonl", b'{"text": 1}', 400),
        ("files", "a.jsonl", b'{"text": "\\ud800"}', 400),
        ("files", "a.pdf", b"%PDF-1.4 nonsense", 400),
        ("files", "a.docx", b"PK\x03\x04", 400),
        ("files", "a.html", b"<img>", 400),
        ("files", "a.mbox", b"text", 400),
        ("files", "a.zip", made.zipped({"a.txt": "text"}), 400),
        ("files", "a.txt", b"x" * 9000 + b"\xff", 400),
        ("replace", "a.txt", b"text", 400),
        ("files", "a.txt", b"text " * 700_000, 413),
    ],
)
def test_files_that_are_no_texts_are_refused(
    http: httpx.Client, field: str, name: str, content: bytes, status: int
) -> None:
    before = http.get("/v1/datastores/docs").json()["num_documents"]
    reply = http.post("/v1/datastores/docs/documents", files=[(field, (name, content))])
    assert reply.status_code == status, reply.text
    assert http.get("/v1/datastores/docs").json()["num_documents"] == before


@pytest.mark.parametrize("cut", [0, 1, 40, 100, 150, -3, -50])
def test_forms_that_break_off_are_refused(http: httpx.Client, cut: int) -> None:
    boundary = "b" * 20
    form = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n'
        f"some text that is long enough to be cut\r\n--{boundary}--\r\n"
    ).encode()
    headers = {"content-type": f"multipart/form-data; boundary={boundary}"}
    reply = http.post("/v1/datastores/docs/documents", content=form[:cut], headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "InvalidInput"), reply.text
    for kind in ("multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=other"):
        reply = http.post("/v1/datastores/docs/documents", content=form, headers={"content-type": kind})
        assert reply.status_code == 400, reply.text


def test_operations_are_listed_cancelled_and_deleted(http: httpx.Client) -> None:
    document = {"id": "last", "text": "the last document"}
    operation = ended(http, http.post("/v1/datastores/docs/documents", json={"documents": [document]}))
    page = http.get("/v1/operations", params={"page_size": 1}).json()
    assert [each["id"] for each in page["data"]] == [operation["id"]]
    rest = http.get("/v1/operations", params={"page_token": page["next_page_token"]}).json()
    assert rest["data"]
    assert http.post(f"/v1/operations/{operation['id']}/cancel").json() == {}  # has ended: without effect
    assert http.delete(f"/v1/operations/{operation['id']}").json() == {}
    assert http.get(f"/v1/operations/{operation['id']}").status_code == 404
    assert http.get("/v1/operations", params={"page_token": page["next_page_token"], "page_size": 5000}).json() == rest


def test_a_server_without_jobs_says_so(web: RunningServer) -> None:
    documents = [{"id": "a", "text": "a"}]
    reply = httpx.post(f"{web.http_url}/v1/datastores/store/documents", json={"documents": documents})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "Incompatible")
    assert "--store-dir" in reply.json()["error"]["message"]


def test_datastores_come_in_pages_by_their_names(model_folder: Path, store_folder: Path, tmp_path: Path) -> None:
    stores = [Path(shutil.copytree(store_folder, tmp_path / name)) for name in ("pears", "apples", "plums")]
    options = ("--threads", "1", "--http-port", "0")
    with (
        RunningServer(tmp_path / "log", model_folder, *stores, options=options) as server,
        httpx.Client(base_url=server.http_url) as http,
        Client(server.address) as client,
    ):
        assert [store.name for store in client.datastores.list()] == ["apples", "pears", "plums"]
        whole = http.get("/v1/datastores").json()
        assert [store["id"] for store in whole["data"]] == ["apples", "pears", "plums"]
        assert whole["next_page_token"] == ""
        first = http.get("/v1/datastores", params={"page_size": 2}).json()
        client.datastores.unload("pears")
        then = http.get("/v1/datastores", params={"page_size": 2, "page_token": first["next_page_token"]}).json()
        assert ([*first["data"], *then["data"]], then["next_page_token"]) == (whole["data"], "")
        for query, field in ({"page_size": -1}, "page_size"), ({"page_token": "plums"}, "page_token"):
            reply = http.get("/v1/datastores", params=query)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


def test_numbers_that_json_does_not_have_are_null_in_every_record() -> None:
    @dataclass
    class Figures:
        loss: float
        others: dict[str, tuple[float, ...]]

    shown = object_of(Figures(math.nan, {"recall": (math.inf, 0.5, -math.inf)}))
    assert shown == {"loss": None, "others": {"recall": [None, 0.5, None]}}
