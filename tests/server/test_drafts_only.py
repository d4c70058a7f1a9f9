"""A datastore without keys on a server: built by a job, and used by the callers that may use it."""

import json
from pathlib import Path

import pytest
from running import PATIENCE_S, RunningServer, is_same_with_drafts

from memlm.api.datastores import NewDocument
from memlm.api.generation import Completion, DraftSource
from memlm.client import Client
from memlm.errors import Incompatible, PermissionDenied

PROMPT = "a model can be read, a model can"
ANN, EVE = "ann's own secret 00", "eve's own secret 00"


def written(client: Client, drafts: int, **options: object) -> Completion:
    return client.generate(PROMPT, temperature=0, max_tokens=28, drafts=drafts, **options).result()


def copied_tokens(completion: Completion) -> int:
    """How many tokens were accepted from the documents of datastores."""
    usage = completion.finished.usage
    return sum(each.accepted for each in usage.drafts if each.source == DraftSource.DATASTORE)


def test_only_a_caller_that_may_use_the_store_gets_its_drafts(
    model_folder: Path, corpus_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokens.toml").write_text(
        f"[[token]]\nname = 'ann'\nsecret = {json.dumps(ANN)}\nstores = ['code']\n"
        f"[[token]]\nname = 'eve'\nsecret = {json.dumps(EVE)}\nstores = ['other']\n"
    )
    (tmp_path / "tokens.toml").chmod(0o600)
    options = ("--threads", "1", "--dtype", "int8", "--auth-file", str(tmp_path / "tokens.toml"))
    options += ("--store-dir", str(tmp_path / "stores"), "--corpus-root", str(corpus_folder))
    with (
        RunningServer(tmp_path / "log", model_folder, options=options) as server,
        Client(server.address, token=ANN) as ann,
        Client(server.address, token=EVE) as eve,
    ):
        plain = written(ann, 0)
        report = ann.datastores.build("code", str(corpus_folder), keys="none").result(PATIENCE_S)
        assert report.index == ann.datastores.get("code").index == "none"
        ann.datastores.add("code", [NewDocument("copied", PROMPT + plain.text)]).result(PATIENCE_S)
        found = written(ann, 6)
        assert copied_tokens(found) >= 10
        assert is_same_with_drafts(found.tokens, plain.tokens)
        assert found.accepted.store is None
        none = written(eve, 6)
        assert copied_tokens(none) == 0
        assert is_same_with_drafts(none.tokens, plain.tokens)
        with pytest.raises(PermissionDenied):
            written(eve, 6, store="code")
        with pytest.raises(Incompatible, match="the datastore 'code' has no keys") as refused:
            ann.search("code", "a model")
        assert str(tmp_path) not in str(refused.value)
        assert ann.score(PROMPT).knn is None
        ann.datastores.delete_documents("code", ["copied"])
        assert copied_tokens(written(ann, 6)) == 0
        ann.datastores.compact("code", purge=True).result(PATIENCE_S)
        assert ann.datastores.get("code").num_deleted_documents == 0
