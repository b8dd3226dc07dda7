"""`pagegate prices`: look at the price book, add to it, import one. Thin: the rules are billing/price_book.py's."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli.session import AsJson, open_session, print_record, print_rows, time_text
from billing.money import parse_usd, usd_decimal
from billing.price_book import (
    Price,
    Tier,
    account_book,
    from_now,
    is_drastic,
    price_before,
    read_prices,
    request_neurons_micro_of,
    set_price,
    with_derived_neurons,
)
from billing.price_fields import PriceFileInvalid
from billing.price_file import import_prices, read_price_file
from billing.rating import rate
from billing.usage import TokenUsage
from billing.volume_prices import VolumePrice, read_volume_prices
from tenancy import provisioning

app = typer.Typer(help="Look at prices and set them.", no_args_is_help=True)

_EXAMPLE = TokenUsage(prompt=1_000, completion=1_000)

_VOLUME_COLUMNS = (
    *("version", "book", "model", "tier", "prompt_tokens_from"),
    *("token_class", "mode", "from_month", "bands"),
)

Neurons = Annotated[int | None, typer.Option(min=0, help="Neurons per million tokens.", show_default="from the price")]


@app.command("list")
def list_command(
    model: Annotated[str | None, typer.Argument(help="Only this model's.", show_default="all")] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """List price rows, oldest first, with those that are no longer in force. USD per million tokens."""
    with open_session() as session, session.database.read() as connection:
        rows = [_fields(price) for price in read_prices(connection, model=model)]
    columns = (
        *("version", "book", "model", "tier", "prompt_tokens_from", "input_usd", "cached_input_usd", "output_usd"),
        *("request_usd", "effective_from", "effective_to"),
    )
    print_rows("Prices", rows, columns=columns, as_json=as_json)


@app.command("set")
def set_command(
    model: Annotated[str, typer.Argument(help="The model's public id.")],
    *,
    input_price: Annotated[str, typer.Option("--input", help="Per million input tokens.")],
    output_price: Annotated[str, typer.Option("--output", help="Per million output tokens.")],
    cached_input: Annotated[str | None, typer.Option(help="Per million cached ones.", show_default="as input")] = None,
    reasoning: Annotated[str | None, typer.Option(help="Per million reasoning ones.", show_default="as output")] = None,
    request_price: Annotated[str, typer.Option("--request", help="For each request, beside its tokens.")] = "0",
    tier: Annotated[Tier, typer.Option(help="Served so.")] = Tier.STANDARD,
    account_id: Annotated[
        str | None, typer.Option("--account", help="For this account alone.", show_default="the list")
    ] = None,
    prompt_from: Annotated[int, typer.Option(min=0, help="For prompts of at least so many tokens.")] = 0,
    nano: Annotated[bool, typer.Option("--nano", help="Prices are whole nano-USD instead of decimal USD.")] = False,
    input_neurons: Neurons = None,
    cached_input_neurons: Neurons = None,
    output_neurons: Neurons = None,
    confirm: Annotated[bool, typer.Option("--confirm", help="Yes, by more than ten times.")] = False,
    as_json: AsJson = False,
) -> None:
    """Set a model's price from now on. Requests that have begun keep the one they began with."""
    now_ns = time.time_ns()
    price = with_derived_neurons(
        model,
        input_nano_per_m=_amount(input_price, nano=nano),
        cached_input_nano_per_m=None if cached_input is None else _amount(cached_input, nano=nano),
        output_nano_per_m=_amount(output_price, nano=nano),
        reasoning_nano_per_m=None if reasoning is None else _amount(reasoning, nano=nano),
        effective_from_ns=now_ns,
    )
    if input_neurons is not None:
        price = replace(price, input_neurons_per_m=input_neurons)
    if cached_input_neurons is not None:
        price = replace(price, cached_input_neurons_per_m=cached_input_neurons)
    if output_neurons is not None:
        price = replace(price, output_neurons_per_m=output_neurons)
    request_nano = _amount(request_price, nano=nano)
    price = replace(
        price,
        tier=tier.value,
        prompt_tokens_from=prompt_from,
        request_nano=request_nano,
        request_neurons_micro=request_neurons_micro_of(request_nano),
    )
    with open_session() as session, session.database.write() as connection:
        if account_id is not None:
            provisioning.get_account(session.database, account_id)
            price = replace(price, book=account_book(account_id))
        before = price_before(connection, price)
        if before is not None and is_drastic(before, price) and not confirm:
            raise typer.BadParameter(
                f"More than ten times more or less than version {before.version}: add --confirm if that is meant."
            )
        price = set_price(connection, from_now(connection, price, now_ns))
    print_record("Price", _fields(price), as_json=as_json)


@app.command("import")
def import_command(
    file: Annotated[Path, typer.Argument(help="TOML or CSV; see deploy/examples/prices-workers-ai.toml.")],
    *,
    confirm: Annotated[bool, typer.Option("--confirm", help="Yes, by more than ten times.")] = False,
    as_json: AsJson = False,
) -> None:
    """Set every price of a file, all or none. Prices that are in force already stay as they are."""
    try:
        read = read_price_file(file)
    except PriceFileInvalid as error:
        raise typer.BadParameter(str(error)) from error
    with open_session() as session, session.database.write() as connection:
        imported = import_prices(connection, read, now_ns=time.time_ns(), confirm=confirm)
    rows = [_fields(price) for price in imported.prices]
    volumes = [_volume_fields(schedule) for schedule in imported.volume_prices]
    if as_json:
        record = {"set": rows, "volume_set": volumes, "unchanged": imported.unchanged}
        print_record("Prices", record, as_json=True)
        return
    columns = (
        *("version", "book", "model", "tier", "input_usd", "cached_input_usd", "output_usd"),
        "usd_of_1000_in_1000_out",
    )
    print_rows(f"Prices set; {imported.unchanged} unchanged", rows, columns=columns, as_json=False)
    if volumes:
        print_rows("Prices by volume set", volumes, columns=_VOLUME_COLUMNS, as_json=False)


@app.command("volume")
def volume_command(
    model: Annotated[str | None, typer.Argument(help="Only this model's.", show_default="all")] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """List prices by a month's volume, which invoices adjust to. `prices import` sets them."""
    with open_session() as session, session.database.read() as connection:
        rows = [_volume_fields(schedule) for schedule in read_volume_prices(connection, model=model)]
    print_rows("Prices by volume", rows, columns=_VOLUME_COLUMNS, as_json=as_json)


def _amount(text: str, *, nano: bool) -> int:
    if nano:
        if not text.isascii() or not text.isdigit():
            raise typer.BadParameter(f"{text!r} is not a whole number of nano-USD.")
        return int(text)
    try:
        return parse_usd(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _fields(price: Price) -> dict[str, Any]:
    cached, reasoning = price.cached_input_nano_per_m, price.reasoning_nano_per_m
    return {
        "version": price.version,
        "book": price.book,
        "model": price.model,
        "tier": price.tier,
        "input_usd": usd_decimal(price.input_nano_per_m),
        "cached_input_usd": None if cached is None else usd_decimal(cached),
        "output_usd": usd_decimal(price.output_nano_per_m),
        "reasoning_usd": None if reasoning is None else usd_decimal(reasoning),
        "prompt_tokens_from": price.prompt_tokens_from,
        "request_usd": usd_decimal(price.request_nano),
        "input_nano_per_m": price.input_nano_per_m,
        "cached_input_nano_per_m": cached,
        "output_nano_per_m": price.output_nano_per_m,
        "reasoning_nano_per_m": reasoning,
        "input_neurons_per_m": price.input_neurons_per_m,
        "cached_input_neurons_per_m": price.cached_input_neurons_per_m,
        "output_neurons_per_m": price.output_neurons_per_m,
        "usd_of_1000_in_1000_out": usd_decimal(rate(_EXAMPLE, price).cost_nano),
        "effective_from": time_text(price.effective_from_ns),
        "effective_to": time_text(price.effective_to_ns),
    }


def _volume_fields(schedule: VolumePrice) -> dict[str, Any]:
    return {
        "version": schedule.version,
        **schedule.place._asdict(),
        "token_class": schedule.token_class.value,
        "mode": schedule.mode.value,
        "from_month": schedule.from_month,
        "bands": ", ".join(f"{band.tokens_from}: {usd_decimal(band.nano_per_m)}" for band in schedule.bands),
    }
