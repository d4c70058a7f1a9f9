"""Which replica gets a call. Ray Serve pickles this module as a whole, so it has no state and imports ours late."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class Router(RequestRouter):
    """Sends each request to the replica that its session id names. Where that one is gone, any may refuse it."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """As Ray Serve's `RequestRouter`."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        meant = pending_request.metadata.session_id
        return [[each for each in candidate_replicas if each.replica_id.unique_id == meant] or candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """As Ray Serve's `RequestRouter`, and tells the pool: the ids, and the names of the actors."""
        super().update_replicas(replicas)
        from memlm.server.inference.replicas.replicas import watchers

        if (watch := watchers.get(self.app_name)) is not None:
            watch({each.replica_id.unique_id: each.replica_id.to_full_id_str() for each in replicas})
