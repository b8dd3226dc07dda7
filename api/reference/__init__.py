"""The API's own description: an OpenAPI 3.1 document of every route, and the page that shows it."""
