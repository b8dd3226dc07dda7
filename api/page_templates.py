"""How HTML pages are written: all is escaped, an unknown name is an error. Used by dashboard and reference."""

import jinja2


def templates_of(package: str) -> jinja2.Environment:
    """Those in the package's folder `templates`."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader(package, "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
