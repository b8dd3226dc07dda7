import itertools

from gateway.cache_scope import CacheScopes

SECRET = b"s" * 32


def test_gateways_with_one_secret_name_a_scope_alike_and_others_do_not() -> None:
    assert CacheScopes(SECRET).of("a", "m") == CacheScopes(SECRET).of("a", "m")
    assert CacheScopes(SECRET).of("a", "m") != CacheScopes(b"t" * 32).of("a", "m")


def test_every_account_and_model_has_a_scope_of_its_own() -> None:
    scopes = CacheScopes(SECRET)
    names = ("a", "b", "ab", "", "a/b")
    assert len({scopes.of(account, model) for account, model in itertools.product(names, names)}) == len(names) ** 2


def test_a_scope_tells_nothing_of_the_account() -> None:
    scope = CacheScopes(SECRET).of("0123456789abcdef", "model")
    assert len(scope) == 64
    assert "0123456789abcdef" not in scope
