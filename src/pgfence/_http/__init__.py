"""Rules of HTTP, without a framework or a server."""
