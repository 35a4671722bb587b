"""The handling of HTTP requests, for `asgi`, `wsgi` and `fastapi`."""
