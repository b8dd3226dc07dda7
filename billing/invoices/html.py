"""An invoice as one HTML page that needs nothing else: it prints well, and every name in it is escaped."""

from functools import cache

import jinja2

from billing.invoices import wording
from billing.invoices.document import Invoice


def render_html(invoice: Invoice) -> str:
    return _template().render(
        title=wording.title(invoice),
        issued=wording.issued(invoice),
        period=wording.period(invoice),
        account_id=invoice.account_id,
        seller=invoice.seller,
        buyer=invoice.buyer,
        lines=list(wording.line_texts(invoice)),
        sums=wording.sums(invoice),
    )


@cache
def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("billing.invoices", "")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template("invoice.html.j2")
