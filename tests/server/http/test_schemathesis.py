"""Requests made from our own OpenAPI document, valid and not, by schemathesis: no answer is a fault of the server."""

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from running import RunningServer

from memlm.server.http.openapi import openapi_document

REFUSALS = {503, 507}
schema = schemathesis.openapi.from_dict(openapi_document())


@schema.parametrize()
@settings(
    max_examples=25,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_what_the_document_allows_is_no_fault_of_the_server(case: schemathesis.Case, random_web: RunningServer) -> None:
    reply = case.call(base_url=random_web.http_url)
    assert reply.status_code < 500 or reply.status_code in REFUSALS, (case.as_curl_command(), reply.text)
