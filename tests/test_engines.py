"""Ports of the engines and gateways that tests start."""

from tests.engines import free_port


def test_no_port_is_given_twice_nor_one_that_the_system_or_the_service_gives() -> None:
    given = [free_port() for _ in range(20)]
    assert len(set(given)) == 20
    assert all(port in range(10_000, 16_384) for port in given)
