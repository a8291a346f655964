"""Every RPC has a policy, and a guard follows it."""

from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from hubring.protos import control_pb2, data_pb2
from hubring.ps.security.guard import HEADER, MOST_FORMER, POLICIES, SCHEME, Guard, Role

SERVED = (control_pb2, data_pb2, health_pb2, reflection_pb2)
"""The .proto files of all services that a server or a shard registers."""
METHODS = {
    f"/{service.full_name}/{method.name}"
    for module in SERVED
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name != "Watch"  # the one method that is not served
}
SECRETS = {role: f"{role} secret" for role in Role}
MEMBERS = sorted(method for method, policy in POLICIES.items() if policy.former)


def metadata(secret: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "grpc"), (HEADER, SCHEME + secret)]


def test_every_rpc_has_a_policy_and_every_policy_an_rpc() -> None:
    assert POLICIES.keys() == METHODS


def test_only_an_operator_changes_a_server_and_only_the_hub_its_shards() -> None:
    for call in ("Checkpoint", "RotateToken"):
        assert POLICIES[f"/hubring.v1.Control/{call}"].roles == {Role.OPERATOR}
    assert all(policy.roles == {Role.HUB} for method, policy in POLICIES.items() if "ShardControl" in method)


@pytest.mark.parametrize("method", sorted(POLICIES))
def test_a_guard_lets_in_only_the_roles_of_the_policy(method: str) -> None:
    guard, policy = Guard(SECRETS), POLICIES[method]
    for role, secret in SECRETS.items():
        assert (guard.objection(method, metadata(secret)) == "") is (role in policy.roles)
    assert all(guard.objection(method, metadata(stranger)) for stranger in ("", "guessed", "worker"))
    assert guard.objection(method, [])


def test_an_rpc_without_a_policy_is_refused_whatever_the_secret() -> None:
    guard = Guard(SECRETS)
    for secret in SECRETS.values():
        assert guard.objection("/hubring.v1.Control/New", metadata(secret)).endswith("has no policy")


def test_refusals_say_what_is_wrong_without_the_secret() -> None:
    guard = Guard({Role.WORKER: "old"})
    join = "/hubring.v1.Control/Join"
    assert guard.objection(join, []) == "the call has no token"
    assert guard.objection(join, metadata("no such")) == "the token is not this server's"
    guard.rotate({Role.WORKER: "new", Role.READER: "reads"})
    assert guard.objection(join, metadata("reads")) == "the token is for another role"
    status = "/hubring.v1.Control/Status"
    assert guard.objection(status, metadata("old")).startswith("the token has expired")
    assert guard.objection(join, metadata("new")) == ""


@pytest.mark.parametrize("method", MEMBERS)
def test_members_stay_when_tokens_are_rotated(method: str) -> None:
    guard = Guard(SECRETS)
    guard.rotate({role: f"new {role}" for role in Role})
    roles = POLICIES[method].roles
    assert all(guard.objection(method, metadata(SECRETS[role])) == "" for role in roles)


def test_calls_that_take_earlier_secrets_name_their_sender_or_say_why_not() -> None:
    requests = {
        f"/{service.full_name}/{method.name}": method.input_type.fields_by_name
        for module in (control_pb2, health_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    for method in MEMBERS:
        fields = requests[method]
        named = bool({"incarnation", "token"} & set(fields))
        assert named != ("reply is only" in POLICIES[method].former), method


def test_a_process_that_waits_to_join_may_ask_again_after_a_rotation() -> None:
    guard = Guard(SECRETS)
    old = metadata(SECRETS[Role.WORKER])
    assert guard.expired_for("waits", old) == ""
    guard.rotate({role: f"new {role}" for role in Role})
    assert guard.expired_for("waits", old) == ""
    assert guard.expired_for("new", old).startswith("the token has expired")
    assert guard.expired_for("new", metadata(f"new {Role.WORKER}")) == ""


def test_a_guard_forgets_the_secrets_of_old_rotations_and_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.ps.security.guard.MOST_ASKED", 2)
    guard = Guard({Role.WORKER: "0"})
    beat = "/hubring.v1.Control/Heartbeat"
    for number in range(1, MOST_FORMER + 2):
        guard.rotate({Role.WORKER: str(number)})
    assert guard.objection(beat, metadata("1")) == ""
    assert guard.objection(beat, metadata("0")) == "the token is not this server's"
    for process in "abc":
        guard.expired_for(process, metadata(str(MOST_FORMER + 1)))
    guard.rotate({Role.WORKER: "last"})
    assert [bool(guard.expired_for(each, metadata("2"))) for each in "abc"] == [True, False, False]
