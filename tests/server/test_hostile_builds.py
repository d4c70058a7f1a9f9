"""Builds that a caller asks for beside our client: what could leave the corpus or take memory makes no operation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from running import RunningServer

from memlm.client import Client
from memlm.v1 import datastores_pb2, datastores_pb2_grpc


@pytest.fixture(scope="module")
def building(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, corpus_folder: Path
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("building")
    options = ("--threads", "1", "--store-dir", str(folder / "stores"), "--corpus-root", str(corpus_folder))
    with RunningServer(folder / "log", model_folder, options=options) as server:
        yield server


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("glob", glob) for glob in ("../*", "../../../../**/*", "/etc/*", "a/../../*", "")),
        *(("index", index) for index in ("IVF20000000,SQfp16", "IVF4,PQ1x24", "OPQ64_1000000,IVF4,PQ4", "IVF0,SQ8")),
        ("index", ",Flat,RFlat"),
    ],
)
def test_a_hostile_build_is_refused_before_there_is_an_operation(
    building: RunningServer, corpus_folder: Path, field: str, value: str
) -> None:
    values: dict[str, Any] = {"store": "docs", "corpus": [str(corpus_folder)], field: value}
    request = datastores_pb2.BuildDatastoreRequest(**values)
    with grpc.insecure_channel(building.address) as channel, pytest.raises(grpc.RpcError) as refused:
        datastores_pb2_grpc.DatastoresStub(channel).BuildDatastore(request, timeout=60)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "expected" in refused.value.details()
    with Client(building.address) as client:
        assert client.operations.list() == ()


@pytest.mark.parametrize("index", ["IVF100000,SQfp16", "PCA33,IVF4,SQ8", "IVF4,PQ7"])
def test_an_index_too_large_for_the_texts_or_the_keys_fails_with_its_reason(
    building: RunningServer, corpus_folder: Path, index: str
) -> None:
    with Client(building.address) as client:
        job = client.datastores.build("docs", str(corpus_folder), index=index)
        info = job.wait(60)
        assert "expected" in str(info.error)
        assert type(info.error).__name__ == "InvalidInput"
        client.operations.delete(job.name)
