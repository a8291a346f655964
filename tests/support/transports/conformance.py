"""Conformance checks for transports; the tests run each check on every transport.

    @pytest.mark.parametrize("check", CHECKS)
    def test_zmq(check): check(ZmqTransport)

A check gets a function that creates a transport. It uses one transport for both ends, and waits at most
PATIENCE.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.support.transports.connection_checks import (
    answers_many_requests_in_any_order,
    answers_others_while_one_does_not_read,
    closes_twice,
    goes_from_thread_to_thread,
    hands_out_last_replies_then_tells_of_the_loss,
    leaves_nothing_behind,
    outlives_a_client_that_leaves,
    overtakes_only_by_priority,
    refuses_a_dead_address_in_time,
    serves_several_clients_at_once,
)
from tests.support.transports.payload_checks import (
    allocates_memory_to_send_from,
    carries_headers_up_to_the_bound,
    echoes_every_size,
    fills_the_parts_of_a_window_apart,
    keeps_replies_that_change_after_sending,
    keeps_what_waits_where_it_is,
    lands_replies_over_their_own_request,
    lands_replies_where_asked_or_brings_them,
    shows_what_the_reply_said_until_the_next,
)
from tests.support.transports.serving import MakeTransport

CHECKS: tuple[Callable[[MakeTransport], None], ...] = (
    echoes_every_size,
    carries_headers_up_to_the_bound,
    allocates_memory_to_send_from,
    lands_replies_where_asked_or_brings_them,
    shows_what_the_reply_said_until_the_next,
    fills_the_parts_of_a_window_apart,
    lands_replies_over_their_own_request,
    answers_many_requests_in_any_order,
    serves_several_clients_at_once,
    goes_from_thread_to_thread,
    keeps_replies_that_change_after_sending,
    overtakes_only_by_priority,
    keeps_what_waits_where_it_is,
    answers_others_while_one_does_not_read,
    outlives_a_client_that_leaves,
    hands_out_last_replies_then_tells_of_the_loss,
    closes_twice,
    refuses_a_dead_address_in_time,
    leaves_nothing_behind,
)
